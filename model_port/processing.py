"""Converts images to patches and expands their placeholders, in numpy and Pillow. A video frame is an image.

Only `VisionContract` decides frame sizes. Its bounds are areas in pixels, although the published files call them
`shortest_edge` and `longest_edge`. Further passes under the same bounds do not resize a frame that has its settled
size, so several processors can use the same frame. The results equal transformers' Qwen2VLImageProcessorPil bit for
bit; deliberate exceptions are tagged DIFFERS.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int64, UInt8
from PIL import Image

from model_port.json_files import Section, read_object

MAX_PIXELS = 2**32  # larger bounds are rejected; this is hundreds of frames of the largest accepted picture
MAX_ASPECT_RATIO = 200
NUM_CHANNELS = 3
RESCALE_FACTOR = 1 / 255  # absent from the published files
SMALLEST_FACTOR = 1e-9
# The published file for each section of transformers 5's processor_config.json.
FLAT_FILES = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}
# transformers' defaults, and the only values supported here.
SUPPORTED_SETTINGS = {
    "do_convert_rgb": True,
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "resample": int(Image.Resampling.BICUBIC),
}


def max_patches(max_pixels: int, patch_px: int, merge: int) -> int:
    """Returns the number of patches of the largest image with at most this area, in whole language tokens."""
    return max_pixels // (patch_px * merge) ** 2 * merge**2


@dataclass(frozen=True)
class VisionContract:
    """How pixels become patches: sizes, area bounds and scaling. Engine and learner use the same contract."""

    patch_px: int
    merge: int
    temporal_patch_frames: int
    min_pixels: int  # bound on height x width of one image after resizing
    max_pixels: int
    mean: tuple[float, float, float]  # subtracted after multiplication by rescale_factor
    std: tuple[float, float, float]
    rescale_factor: float = RESCALE_FACTOR

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            raise ValueError(
                f"min_pixels={self.min_pixels} exceeds max_pixels={self.max_pixels}; lower one or raise the other"
            )
        if self.max_pixels < self.unit_px**2:
            raise ValueError(
                f"max_pixels={self.max_pixels} is less than the smallest image, {self.unit_px} x {self.unit_px} px; "
                f"raise it to {self.unit_px**2} or more"
            )

    @classmethod
    def from_hf(cls, directory: str | Path) -> "VisionContract":
        """Reads the image contract of a Hugging Face directory. If it has both files, they must agree."""
        contracts = {source: _contract(section, source) for source, section in _sections(Path(directory))}
        (source, contract), *duplicates = contracts.items()
        for other_source, other in duplicates:
            if other != contract:
                wrong = ", ".join(name for name, value in asdict(other).items() if value != getattr(contract, name))
                raise ValueError(f"{source} and {other_source} disagree on {wrong}; delete one of the two files")
        return contract

    @property
    def unit_px(self) -> int:
        """The side of the square that becomes one language token; sides of resized images are multiples of it."""
        return self.patch_px * self.merge

    def max_patches(self, max_pixels: int) -> int:
        return max_patches(max_pixels, self.patch_px, self.merge)

    @property
    def patch_values(self) -> int:
        return NUM_CHANNELS * self.temporal_patch_frames * self.patch_px**2

    @cached_property
    def normalized(self) -> Float32[np.ndarray, "channels 256"]:
        """The normalized value of every byte per channel, with the same rounding as transformers."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.asarray(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (rescaled[None, :] - mean) / std


def frame_size(height: int, width: int, contract: VisionContract) -> tuple[int, int]:
    """Returns an image's height and width after one pass (transformers image_processing_pil_qwen2_vl.py, smart_resize).

    Both are multiples of the unit. The function rounds halves to even, and multiplies and divides in the reference's
    order, because another order would give other multiples for some sizes.
    """
    if height < 1 or width < 1:
        raise ValueError(f"an image must have at least one pixel, got height {height}, width {width}")
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(
            f"the longer side of an image may be at most {MAX_ASPECT_RATIO} times the shorter, "
            f"got height {height}, width {width} ({ratio:.1f} times); crop it"
        )
    unit_px = contract.unit_px
    down, across = round(height / unit_px), round(width / unit_px)
    if down * across * unit_px**2 > contract.max_pixels:
        shrink = math.sqrt(height * width / contract.max_pixels)
        down = max(1, math.floor(height / shrink / unit_px))
        across = max(1, math.floor(width / shrink / unit_px))
    elif down * across * unit_px**2 < contract.min_pixels:
        enlarge = math.sqrt(contract.min_pixels / (height * width))
        down = math.ceil(height * enlarge / unit_px)
        across = math.ceil(width * enlarge / unit_px)
    return down * unit_px, across * unit_px


def settled_size(height: int, width: int, contract: VisionContract) -> tuple[int, int]:
    """Returns a size that further passes do not change, so that every processor gets the same pixels.

    One pass is enough for ordinary images. More passes are needed if rounding crosses a bound: for aspect ratios above
    about 50 with the recipe's bounds, or for bounds that are so close together that no size fits between them.
    """
    passes = [frame_size(height, width, contract)]
    while (following := frame_size(*passes[-1], contract)) != passes[-1]:
        if following in passes:
            raise ValueError(
                f"an image of {height} x {width} px has no stable size between min_pixels={contract.min_pixels} and "
                f"max_pixels={contract.max_pixels}: resizing alternates between {passes[-1]} and {following}; "
                f"move the bounds further apart"
            )
        passes.append(following)
    return passes[-1]


def resize(image: np.ndarray, contract: VisionContract) -> UInt8[np.ndarray, "height width 3"]:
    """Resizes an image to its `frame_size`, bicubic. An array that has this size is returned unchanged."""
    rgb = np.asarray(image)
    if rgb.dtype != np.uint8 or rgb.ndim != 3 or rgb.shape[2] != NUM_CHANNELS:
        raise ValueError(
            f"an image must be uint8 [height, width, {NUM_CHANNELS}], got {rgb.dtype} {list(rgb.shape)}; "
            f"scale to 0..255, put channels last and convert to RGB"
        )
    height, width = frame_size(rgb.shape[0], rgb.shape[1], contract)
    if rgb.shape[:2] == (height, width):
        return rgb
    return np.asarray(Image.fromarray(rgb).resize((width, height), Image.Resampling.BICUBIC))


def process_images(
    images: Sequence[np.ndarray], contract: VisionContract
) -> tuple[Float32[np.ndarray, "P values"], Int64[np.ndarray, "images 3"]]:
    """Returns `pixel_values` and `image_grid_thw`, as transformers' image processor does."""
    if len(images) == 0:
        raise ValueError("expected at least one image, got an empty list; omit pixel_values for text only")
    resized = [resize(image, contract) for image in images]
    patch_px = contract.patch_px
    grids = [(1, frame.shape[0] // patch_px, frame.shape[1] // patch_px) for frame in resized]
    # An image fills all frames of its temporal patch, so it is normalized once and then broadcast.
    shape = (NUM_CHANNELS, contract.temporal_patch_frames, patch_px**2)
    patches = np.empty((sum(map(math.prod, grids)), *shape), np.float32)
    start = 0
    for frame, grid in zip(resized, grids, strict=True):
        end = start + math.prod(grid)
        cut = _cut(frame, contract)
        for channel, table in enumerate(contract.normalized):
            patches[start:end, channel] = np.take(table, cut[:, channel, None])
        start = end
    return patches.reshape(len(patches), contract.patch_values), np.array(grids, np.int64)


def _cut(frame: np.ndarray, contract: VisionContract) -> np.ndarray:
    """Cuts [height, width, 3] into patches [P, 3, patch_px * patch_px], in merge order."""
    height, width, _ = frame.shape
    patch_px, merge, unit_px = contract.patch_px, contract.merge, contract.unit_px
    split = frame.reshape(height // unit_px, merge, patch_px, width // unit_px, merge, patch_px, NUM_CHANNELS)
    row, inner_row, y, column, inner_column, x, channel = range(split.ndim)
    return split.transpose(row, column, inner_row, inner_column, channel, y, x).reshape(-1, NUM_CHANNELS, patch_px**2)


def token_counts(grid_thw: Int[np.ndarray, "images 3"], merge: int) -> list[int]:
    return (grid_thw.prod(axis=1) // merge**2).tolist()


def expand_placeholders(
    ids: Int[np.ndarray, " T"], num_tokens: Sequence[int], image_token_id: int
) -> Int[np.ndarray, " expanded"]:
    """Repeats each image's placeholder once per token of the image. Images are in the order of their placeholders."""
    at = np.flatnonzero(ids == image_token_id)
    if len(at) != len(num_tokens):
        raise ValueError(
            f"the ids have {len(at)} placeholders (token {image_token_id}), but there are {len(num_tokens)} images; "
            f"write one placeholder per image, not expanded"
        )
    repeats = np.ones(len(ids), np.int64)
    repeats[at] = num_tokens
    return np.repeat(ids, repeats)


def _sections(directory: Path) -> list[tuple[str, Mapping[str, Any]]]:
    """Reads the image processor's settings: pairs of a source for errors and its keys, processor_config.json first."""
    name, nested_path = "image_processor", directory / "processor_config.json"
    flat_path = directory / FLAT_FILES[name]
    sections = []
    # A published processor_config.json may lack this section.
    if nested_path.is_file() and name in (nested := read_object(nested_path)):
        sections.append((f"{nested_path}, {name}", Section(str(nested_path), nested).section(name).values))
    if flat_path.is_file():
        sections.append((str(flat_path), read_object(flat_path)))
    if not sections:
        raise ValueError(
            f"{directory} has neither {flat_path.name} nor a processor_config.json with the key {name!r}; "
            f"copy the processor files of the checkpoint there"
        )
    return sections


def _contract(values: Mapping[str, Any], source: str) -> VisionContract:
    section = Section(source, values)
    for key, supported in SUPPORTED_SETTINGS.items():
        section.expect(key, supported)
    mean = section.numbers("image_mean", NUM_CHANNELS, -1000, 1000)
    std = section.numbers("image_std", NUM_CHANNELS, SMALLEST_FACTOR, 1000)
    try:
        return VisionContract(
            patch_px=section.count("patch_size", 256),
            merge=section.count("merge_size", 16),
            temporal_patch_frames=section.count("temporal_patch_size", 16),
            min_pixels=_bound(section, "min_pixels", "shortest_edge"),
            max_pixels=_bound(section, "max_pixels", "longest_edge"),
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            rescale_factor=section.number("rescale_factor", SMALLEST_FACTOR, 1000, RESCALE_FACTOR),
        )
    except ValueError as problem:
        raise ValueError(str(problem) if str(problem).startswith(source) else f"{source}: {problem}") from None


def _bound(section: Section, old_key: str, key: str) -> int:
    """Reads a bound, which has three possible keys. Published files have several of them, and some are null."""
    size = section.section("size", {})
    spellings = [(size, key), (size, old_key), (section, old_key)]
    found = {f"{at.prefix}{name}": at.count(name, MAX_PIXELS) for at, name in spellings if at.has(name)}
    if not found:
        raise ValueError(f"{section.source}: size.{key} (or {old_key}) is missing; set it, in pixels of area")
    if len(set(found.values())) > 1:
        values = " and ".join(f"{name}={value}" for name, value in found.items())
        raise ValueError(f"{section.source}: {values} contradict each other; keep one of them")
    return next(iter(found.values()))
