"""Writes videos reproducibly: equal pictures give an identical file in every process."""

from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np

X264 = {
    "preset": "veryfast",
    # On AVX-512, x264's macroblock tree processes eight 16 px blocks at once. At the end of a row with fewer blocks it
    # reads uninitialized memory, which changes how blocks are coded.
    "mbtree": "0",
    "threads": "1",  # the result depends on the number of threads, which defaults to the number of cores
}


def write_video(path: Path, pictures: Iterable[np.ndarray], fps: int) -> None:
    """Writes an mp4. Pictures are uint8 [height, width, 3] with even sides."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options=X264)
        for number, pixels in enumerate(pictures):
            if not number:
                stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
