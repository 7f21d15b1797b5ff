"""Writes a video: the same pictures are the same file, byte for byte, in every process."""

from collections.abc import Iterable
from pathlib import Path

import av
import numpy as np

X264 = {
    "preset": "veryfast",
    # On AVX-512 x264's macroblock tree takes eight blocks of 16 px at a time, also at the end of a row that has no
    # multiple of eight: there it reads memory that nobody wrote, and how well a block is coded comes to depend on it.
    "mbtree": "0",
    "threads": "1",  # another number gives another file, and the default follows from the machine's cores
}


def write_video(path: Path, pictures: Iterable[np.ndarray], fps: int) -> None:
    """An mp4; a picture is uint8 [height, width, 3], both sides even."""
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps, options=X264)
        for number, pixels in enumerate(pictures):
            if not number:
                stream.height, stream.width, stream.pix_fmt = *pixels.shape[:2], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
