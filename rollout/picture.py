"""An image for a model: pixels at their final size, and a key that identifies their content.

All code that shows, sends or trains on an image shares this object. Equal frames are therefore stored once and encoded
for the wire once, and the learner recognizes them as equal.
"""

import base64
import hashlib
import io
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from PIL import Image, ImageOps

from rollout.video.errors import ImageError, VideoUnavailable

# An allow-list, because Pillow runs an external program for some formats, such as EPS.
IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MAX_IMAGE_PIXELS = 2**26  # phone photos have 50 million pixels; a decoded pixel takes up to 8 bytes
IMAGES_AT_A_TIME = 4  # images of MAX_IMAGE_PIXELS then take at most 2 GiB
IMAGE_SLOTS = threading.BoundedSemaphore(IMAGES_AT_A_TIME)  # held by each thread of this process that decodes an image
JPEG_QUALITY = 95  # of 100; higher values only make files larger
PNG_EFFORT = 1  # of 9; on loopback, encoding time matters more than size


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels and a key that identifies them. A writable array is copied, so you can still draw in it."""

    key: str  # equal keys mean equal pixels
    pixels: np.ndarray  # uint8 [height, width, 3], read-only

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if self.pixels.dtype != np.uint8 or len(shape) != 3 or shape[2] != 3 or 0 in shape:
            raise ValueError(f"a picture must be uint8 [height, width, 3], got {self.pixels.dtype} {list(shape)}")
        if self.pixels.flags.writeable:
            object.__setattr__(self, "pixels", self.pixels.copy())
            self.pixels.flags.writeable = False

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Picture":
        """Makes a picture whose key is the hash of its pixels."""
        digest = hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16)
        digest.update(repr(pixels.shape).encode())
        return cls(digest.hexdigest(), pixels)

    @classmethod
    def of_png(cls, png_base64: str) -> "Picture":
        return cls.of(np.asarray(Image.open(io.BytesIO(base64.b64decode(png_base64))).convert("RGB")))

    def resized(self, height: int, width: int) -> "Picture":
        if self.size_px == (height, width):
            return self
        return Picture.of(np.asarray(Image.fromarray(self.pixels).resize((width, height), Image.Resampling.BICUBIC)))

    @property
    def size_px(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def num_tokens(self, token_px: int) -> int:
        """Returns how many tokens the picture takes, one for each square of `token_px`."""
        height, width = self.size_px
        return height * width // token_px**2

    @cached_property
    def jpeg_base64(self) -> str:
        """A JPEG for endpoints, which may be on other machines, because it is smaller than a PNG."""
        return self.encoded("JPEG", quality=JPEG_QUALITY, subsampling=0)

    @cached_property
    def png_base64(self) -> str:
        return self.encoded("PNG", compress_level=PNG_EFFORT)

    def encoded(self, kind: str, **options: int) -> str:
        """Encodes the picture as a file in this format, in base64."""
        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, kind, **options)
        return base64.b64encode(buffer.getvalue()).decode()


def read_image(
    path: str, size_of: Callable[[int, int], tuple[int, int]] = lambda height, width: (height, width)
) -> Picture:
    """Reads an image file. `size_of` maps the file's height and width to the picture's.

    Raises VideoUnavailable if memory runs out, and ImageError for any other error, so that a bad image only invalidates
    its row.
    """
    try:
        with IMAGE_SLOTS:
            with Image.open(path, formats=IMAGE_FORMATS) as image:  # reads only the header
                if image.width * image.height > MAX_IMAGE_PIXELS:
                    raise ValueError(f"{image.width}x{image.height} pixels are more than {MAX_IMAGE_PIXELS}")
                upright = in_rgb(image)
            height, width = size_of(upright.height, upright.width)
            resized = upright.resize((width, height), Image.Resampling.BICUBIC)
    except MemoryError:
        raise VideoUnavailable("an image cannot be decoded: too little memory") from None
    except Exception as problem:  # Pillow may raise any error, even SyntaxError
        raise ImageError(f"{path} cannot be read: {str(problem) or type(problem).__name__}") from None
    return Picture.of(np.asarray(resized))


def is_image(path: str) -> bool:
    """Returns whether Pillow can open the file. A GIF counts as a video, because it may be animated."""
    try:
        with Image.open(path, formats=[name for name in IMAGE_FORMATS if name != "GIF"]):
            return True
    except Exception:  # Pillow may raise any error
        return False


def in_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB and rotates it as its EXIF orientation says, as transformers does."""
    ImageOps.exif_transpose(image, in_place=True)  # avoids a copy of images that need no rotation
    return image.convert("RGB")
