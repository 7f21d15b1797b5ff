"""Images and videos to patches, and placeholders to as many tokens, in numpy and Pillow.

`VisionContract` alone decides frame sizes. Its bounds are areas in pixels, although the published files call them
`shortest_edge` and `longest_edge`. A frame resized to its settled size is not resized again by later passes under the
same bounds, so several processors can share it. The results equal transformers' Qwen2VLImageProcessorPil bit for bit;
deliberate exceptions are tagged DIFFERS.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int, Int64, Shaped, UInt8
from PIL import Image

from model_port.config import ModelConfig
from model_port.json_files import Section, read_object

MAX_PIXELS = 2**32  # the largest accepted bound: hundreds of frames of the largest accepted picture
MAX_ASPECT_RATIO = 200
NUM_CHANNELS = 3
RESCALE_FACTOR = 1 / 255  # absent from the published files
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


@dataclass(frozen=True)
class VisionContract:
    """How pixels become patches: sizes, area bounds and scaling, the same for engine and learner."""

    patch_px: int
    merge: int
    temporal_patch_frames: int
    min_pixels: int  # of one image, height x width, after resizing
    max_pixels: int
    mean: tuple[float, float, float]  # of values multiplied by rescale_factor
    std: tuple[float, float, float]
    rescale_factor: float = RESCALE_FACTOR

    def __post_init__(self) -> None:
        for name in ("patch_px", "merge", "temporal_patch_frames"):
            _require_count(name, getattr(self, name))
        _require_bounds("min_pixels", self.min_pixels, "max_pixels", self.max_pixels)
        if self.max_pixels < self.unit_px**2:
            raise ValueError(
                f"max_pixels={self.max_pixels} is less than the smallest image, {self.unit_px} x {self.unit_px} px; "
                f"raise it to {self.unit_px**2} or more"
            )
        if not all(math.isfinite(value) for value in (*self.mean, *self.std, self.rescale_factor)):
            raise ValueError(
                f"mean={self.mean}, std={self.std} and rescale_factor={self.rescale_factor} must be finite"
            )
        if not all(value > 0 for value in (*self.std, self.rescale_factor)):
            raise ValueError(f"std={self.std} and rescale_factor={self.rescale_factor} must be greater than 0")

    @classmethod
    def from_hf(cls, directory: str | Path) -> "VisionContract":
        """The image contract of a Hugging Face directory; if it has both files, they must agree."""
        contracts = {source: _contract(section, source) for source, section in _sections(directory, "image_processor")}
        (source, contract), *duplicates = contracts.items()
        for other_source, other in duplicates:
            if other != contract:
                wrong = ", ".join(name for name, value in asdict(other).items() if value != getattr(contract, name))
                raise ValueError(f"{source} and {other_source} disagree on {wrong}; delete one of the two files")
        return contract

    def to_hf(self) -> dict[str, Any]:
        """A `preprocessor_config.json` like the published checkpoints', with all values explicit."""
        return {
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            **self._shared_to_hf(),
        }

    def _shared_to_hf(self) -> dict[str, Any]:
        return {
            "patch_size": self.patch_px,
            "merge_size": self.merge,
            "temporal_patch_size": self.temporal_patch_frames,
            "image_mean": list(self.mean),
            "image_std": list(self.std),
            "rescale_factor": self.rescale_factor,
            **SUPPORTED_SETTINGS,
        }

    @property
    def unit_px(self) -> int:
        """Side of the square that becomes one language token; all sides of resized images are multiples of it."""
        return self.patch_px * self.merge

    @property
    def patch_values(self) -> int:
        return NUM_CHANNELS * self.temporal_patch_frames * self.patch_px**2

    @cached_property
    def normalised(self) -> Float32[np.ndarray, "channels 256"]:
        """Every byte's normalized value per channel, with the same rounding as transformers' rescale and normalize."""
        rescaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        mean, std = (np.asarray(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (rescaled[None, :] - mean) / std


@dataclass(frozen=True)
class VideoBounds:
    """transformers' bounds for a video: the pixels of all frames together, frames x height x width.

    Not part of the contract, which bounds one image: under a total, the frame size depends on the number of frames.
    For bounds per frame, multiply them by the number of frames.
    """

    min_total_pixels: int
    max_total_pixels: int

    def __post_init__(self) -> None:
        _require_bounds("min_total_pixels", self.min_total_pixels, "max_total_pixels", self.max_total_pixels)

    @classmethod
    def from_hf(cls, directory: str | Path) -> "VideoBounds":
        """The video bounds of a Hugging Face directory; its other video settings must equal the image contract."""
        contract = VisionContract.from_hf(directory)
        contracts = {}
        for source, section in _sections(directory, "video_processor"):
            if section.get("cap_pixels_per_frame"):
                raise ValueError(
                    f"{source}: cap_pixels_per_frame=true is not supported; set it to false and pass the bounds of "
                    f"each video yourself, VideoBounds(min_total_pixels, max_total_pixels)"
                )
            for key, ours in contract._shared_to_hf().items():
                Section(source, section).expect(key, ours)
            contracts[source] = cls(*_bounds(section, source))
        (source, bounds), *duplicates = contracts.items()
        for other_source, other in duplicates:
            if other != bounds:
                raise ValueError(f"{source} has {bounds}, {other_source} has {other}; delete one of the two files")
        return bounds

    def to_hf(self, contract: VisionContract) -> dict[str, Any]:
        """A `video_preprocessor_config.json` like the published checkpoints'."""
        return {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "processor_class": "Qwen3VLProcessor",
            "size": {"shortest_edge": self.min_total_pixels, "longest_edge": self.max_total_pixels},
            **contract._shared_to_hf(),
        }


def frame_size(height: int, width: int, contract: VisionContract) -> tuple[int, int]:
    """Height and width of an image after one pass (transformers image_processing_pil_qwen2_vl.py, smart_resize)."""
    _require_shape(height, width)
    return _fit(height, width, contract.unit_px, contract.min_pixels, contract.max_pixels)


def settled_size(height: int, width: int, contract: VisionContract) -> tuple[int, int]:
    """The size that further passes do not change, so that every processor under the contract gets the same pixels.

    One pass is enough for ordinary images. More are needed if rounding crosses a bound: with aspect ratios above about
    50 under the recipe's bounds, or with bounds so close together that no size fits between them.
    """
    passes = [frame_size(height, width, contract)]
    while (following := frame_size(*passes[-1], contract)) != passes[-1]:
        if following in passes:
            raise ValueError(
                f"an image of {height} x {width} px has no stable size between min_pixels={contract.min_pixels} and "
                f"max_pixels={contract.max_pixels}, resizing alternates between {passes[-1]} and {following}; "
                f"move the bounds further apart"
            )
        passes.append(following)
    return passes[-1]


def video_frame_size(
    num_frames: int, height: int, width: int, contract: VisionContract, bounds: VideoBounds
) -> tuple[int, int]:
    """Height and width of each frame of a video (transformers video_processing_qwen3_vl.py, smart_resize)."""
    if num_frames < contract.temporal_patch_frames:
        raise ValueError(
            f"a video needs at least {contract.temporal_patch_frames} frames, got {num_frames}; "
            f"repeat the frame, or send it as an image"
        )
    _require_area(height, width)
    unit_px = contract.unit_px
    if min(height, width) < unit_px:
        enlarge = max(unit_px / height, unit_px / width)
        height, width = int(height * enlarge), int(width * enlarge)
    _require_shape(height, width)
    return _fit(
        height,
        width,
        unit_px,
        bounds.min_total_pixels,
        bounds.max_total_pixels,
        num_frames,
        round(num_frames / contract.temporal_patch_frames) * contract.temporal_patch_frames,
    )


def _fit(
    height: int,
    width: int,
    unit_px: int,
    min_pixels: int,
    max_pixels: int,
    num_frames: int = 1,
    num_rounded_frames: int = 1,
) -> tuple[int, int]:
    """Sides in multiples of the unit, close to the given ones, with the area of all frames within the bounds.

    Rounds halves to even and multiplies and divides in the reference's order. Another order gives other multiples for
    some sizes.
    """
    down, across = round(height / unit_px), round(width / unit_px)
    num_pixels = num_rounded_frames * down * across * unit_px**2
    if num_pixels > max_pixels:
        shrink = math.sqrt(num_frames * height * width / max_pixels)
        down = max(1, math.floor(height / shrink / unit_px))
        across = max(1, math.floor(width / shrink / unit_px))
    elif num_pixels < min_pixels:
        enlarge = math.sqrt(min_pixels / (num_frames * height * width))
        down = math.ceil(height * enlarge / unit_px)
        across = math.ceil(width * enlarge / unit_px)
    return down * unit_px, across * unit_px


def to_rgb(image: Image.Image | np.ndarray) -> UInt8[np.ndarray, "height width 3"]:
    """The image's RGB bytes, on white where it is transparent, as in transformers' convert_to_rgb."""
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != NUM_CHANNELS:
            raise ValueError(
                f"an image array must be uint8 [height, width, {NUM_CHANNELS}], got {image.dtype} {list(image.shape)}; "
                f"scale to 0..255, put channels last and convert to RGB"
            )
        _require_area(image.shape[0], image.shape[1])
        return image
    _require_area(image.height, image.width)
    if image.mode.startswith("I;16"):
        # DIFFERS: Pillow, and so transformers, clips 16-bit values at 255, which turns the picture white.
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        values = np.asarray(image)
        if not (values.min() >= 0 and values.max() <= 255):
            raise ValueError(
                f"an image of mode {image.mode} must hold values in 0..255, got {values.min()}..{values.max()}; "
                f"scale it to 8 bits according to its range"
            )
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def resize(
    image: Image.Image | np.ndarray, contract: VisionContract, size_px: tuple[int, int] | None = None
) -> UInt8[np.ndarray, "height width 3"]:
    """The image in RGB, bicubic, at `size_px` (height, width), by default at `frame_size`.

    An image of this size is returned unchanged; an array is returned as the same object.
    """
    rgb = to_rgb(image)
    height, width, _ = rgb.shape
    new_height, new_width = frame_size(height, width, contract) if size_px is None else size_px
    if (height, width) == (new_height, new_width):
        return rgb
    return np.asarray(Image.fromarray(rgb).resize((new_width, new_height), Image.Resampling.BICUBIC))


def patchify(
    frames: Shaped[np.ndarray, "frames height width 3"], contract: VisionContract
) -> Shaped[np.ndarray, "P values"]:
    """Patches of the frames in merge order; a patch's values are ordered by channel, then time, then row.

    `temporal_patch_frames` frames make one layer of patches; the last frame is repeated to fill the last layer.
    """
    layers = _cut(_whole_layers(frames, contract), contract, contract.temporal_patch_frames)
    return layers.reshape(len(layers), contract.patch_values)


def process_images(
    images: Sequence[Image.Image | np.ndarray], contract: VisionContract
) -> tuple[Float32[np.ndarray, "P values"], Int64[np.ndarray, "images 3"]]:
    """`pixel_values` and `image_grid_thw`, as transformers' image processor returns them."""
    if len(images) == 0:
        raise ValueError("expected at least one image, got an empty list; omit pixel_values for text only")
    resized = [resize(image, contract) for image in images]
    grids = [_grid(frame[None], contract) for frame in resized]
    patches = _empty_patches(grids, contract)
    start = 0
    for frame, grid in zip(resized, grids, strict=True):
        end = start + math.prod(grid)
        # An image fills all frames of its temporal patch: normalized once, then broadcast.
        _normalise(_cut(frame[None], contract, 1), contract, out=patches[start:end])
        start = end
    return patches.reshape(len(patches), contract.patch_values), np.array(grids, np.int64)


def process_video(
    frames: Sequence[Image.Image | np.ndarray] | np.ndarray, contract: VisionContract, bounds: VideoBounds
) -> tuple[Float32[np.ndarray, "P values"], Int64[np.ndarray, "1 3"]]:
    """`pixel_values_videos` and `video_grid_thw` of one video, whose frames have one size.

    The contract defines patches and normalization, and `bounds` the area; the contract's own bounds are not used.
    DIFFERS: transformers resizes video in torchvision, which may round bytes differently from Pillow.
    """
    if len(frames) == 0:
        raise ValueError("expected at least one video frame, got an empty list; omit the video")
    originals = [to_rgb(frame) for frame in frames]
    sizes = sorted({(frame.shape[0], frame.shape[1]) for frame in originals})
    if len(sizes) > 1:
        raise ValueError(f"all frames of a video must have one size, got {sizes}; resize them, or send images")
    height, width = sizes[0]
    size_px = video_frame_size(len(originals), height, width, contract, bounds)
    stacked = _whole_layers(np.stack([resize(frame, contract, size_px) for frame in originals]), contract)
    grid = _grid(stacked, contract)
    patches = _empty_patches([grid], contract)
    _normalise(_cut(stacked, contract, contract.temporal_patch_frames), contract, out=patches)
    return patches.reshape(len(patches), contract.patch_values), np.array([grid], np.int64)


def _grid(frames: np.ndarray, contract: VisionContract) -> tuple[int, int, int]:
    """Temporal patches, and patches down and across; an incomplete temporal patch counts as one."""
    num_frames, height, width, _ = frames.shape
    num_layers = -(-num_frames // contract.temporal_patch_frames)
    return num_layers, height // contract.patch_px, width // contract.patch_px


def _whole_layers(frames: np.ndarray, contract: VisionContract) -> np.ndarray:
    num_missing = -len(frames) % contract.temporal_patch_frames
    return np.concatenate([frames, *[frames[-1:]] * num_missing]) if num_missing else frames


def _cut(frames: np.ndarray, contract: VisionContract, layer_frames: int) -> np.ndarray:
    """[frames, height, width, 3] to [P, 3, layer_frames, patch_px * patch_px]."""
    num_frames, height, width, _ = frames.shape
    patch_px, merge, unit_px = contract.patch_px, contract.merge, contract.unit_px
    if num_frames == 0 or height % unit_px or width % unit_px:
        raise ValueError(
            f"frames must be at least one, with sides in multiples of {unit_px} px, got {num_frames} of "
            f"{height} x {width}; resize them first"
        )
    down, across = height // unit_px, width // unit_px
    split = frames.reshape(num_frames // layer_frames, layer_frames, down, merge, patch_px, across, merge, patch_px, 3)
    layers, time, row, inner_row, y, column, inner_column, x, channel = range(split.ndim)
    ordered = split.transpose(layers, row, column, inner_row, inner_column, channel, time, y, x)
    return ordered.reshape(-1, NUM_CHANNELS, layer_frames, patch_px**2)


def _empty_patches(grids: list[tuple[int, int, int]], contract: VisionContract) -> np.ndarray:
    shape = (NUM_CHANNELS, contract.temporal_patch_frames, contract.patch_px**2)
    return np.empty((sum(math.prod(grid) for grid in grids), *shape), np.float32)


def _normalise(cut: np.ndarray, contract: VisionContract, out: np.ndarray) -> None:
    """Normalizes uint8 [P, 3, layer_frames, pixels] by table lookup; a single frame is repeated to fill `out`."""
    for channel, table in enumerate(contract.normalised):
        out[:, channel] = np.take(table, cut[:, channel])


def token_counts(grid_thw: Int[np.ndarray, "images 3"], merge: int) -> list[int]:
    """The number of language tokens of each image, or of each video without timestamps."""
    return (grid_thw.prod(axis=1) // merge**2).tolist()


def expand_placeholders(
    ids: Int[np.ndarray, " T"], num_tokens: Sequence[int], image_token_id: int
) -> Int[np.ndarray, " expanded"]:
    """Repeats each image's placeholder once per token of the image; images are in the order of the ids."""
    at = np.flatnonzero(ids == image_token_id)
    _require_placeholders(len(at), len(num_tokens), image_token_id, "image")
    for number, count in enumerate(num_tokens):
        _require_count(f"the number of tokens of image {number}", count)
    repeats = np.ones(len(ids), np.int64)
    repeats[at] = num_tokens
    return np.repeat(ids, repeats)


def expand_video_placeholders(
    ids: Int[np.ndarray, " T"],
    video_grid_thw: Int[np.ndarray, "videos 3"],
    seconds: Sequence[Sequence[float | int]],
    tokenize: Callable[[str], Sequence[int]],
    config: ModelConfig,
) -> Int[np.ndarray, " expanded"]:
    """Replaces each video's placeholder, per temporal patch, by its time as text and its tokens between start and end.

    `seconds` has one time per temporal patch of each video (`layer_seconds`). `tokenize` returns the ids of a timestamp
    text by itself, without special tokens.
    DIFFERS: transformers 5 keeps the chat template's start and end tokens around the placeholder, outside all frames.
    They are removed here, as in the processor the model was released with (transformers 4.57).
    """
    start, end, pad = config.vision_start_token_id, config.vision_end_token_id, config.video_token_id
    placeholders = np.flatnonzero(ids == pad).tolist()
    _require_placeholders(len(placeholders), len(video_grid_thw), pad, "video")
    _require_placeholders(len(placeholders), len(seconds), pad, "list of seconds for a video")
    pieces, done = [], 0
    for video, (at, (num_layers, down, across)) in enumerate(zip(placeholders, video_grid_thw.tolist(), strict=True)):
        if len(seconds[video]) != num_layers:
            raise ValueError(
                f"video {video} has {num_layers} temporal patches and {len(seconds[video])} times; "
                f"give one time per temporal patch, see layer_seconds"
            )
        wrapped = 0 < at < len(ids) - 1 and (int(ids[at - 1]), int(ids[at + 1])) == (start, end)
        pieces.append(ids[done : at - wrapped])
        frame = [start, *[pad] * (down * across // config.vision.merge_unit), end]
        for layer in seconds[video]:
            pieces.append(np.array([*tokenize(timestamp_text(layer)), *frame], ids.dtype))
        done = at + 1 + wrapped
    return np.concatenate([*pieces, ids[done:]])


def timestamp_text(seconds: float | int) -> str:
    """The text before a frame, `<12.0 seconds>`."""
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ValueError(f"a timestamp must be finite seconds from 0, got {seconds}")
    return f"<{seconds:.1f} seconds>"


def layer_seconds(frame_seconds: Sequence[float | int], temporal_patch_frames: int) -> list[float]:
    """The time of each temporal patch, midway between its first and last frame."""
    num_missing = -len(frame_seconds) % temporal_patch_frames
    padded = [*frame_seconds, *list(frame_seconds[-1:]) * num_missing]
    firsts, lasts = padded[::temporal_patch_frames], padded[temporal_patch_frames - 1 :: temporal_patch_frames]
    return [(first + last) / 2 for first, last in zip(firsts, lasts, strict=True)]


def _sections(directory: str | Path, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    """A processor's settings in a directory: (source for errors, parsed keys), processor_config.json first."""
    directory = Path(directory)
    nested_path = directory / "processor_config.json"
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
    min_pixels, max_pixels = _bounds(values, source)
    mean, std = (section.numbers(key, NUM_CHANNELS, -1000, 1000) for key in ("image_mean", "image_std"))
    try:
        return VisionContract(
            patch_px=section.count("patch_size", 256),
            merge=section.count("merge_size", 16),
            temporal_patch_frames=section.count("temporal_patch_size", 16),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            mean=(mean[0], mean[1], mean[2]),
            std=(std[0], std[1], std[2]),
            rescale_factor=section.number("rescale_factor", 0, 1000, RESCALE_FACTOR),
        )
    except ValueError as problem:
        raise ValueError(str(problem) if str(problem).startswith(source) else f"{source}: {problem}") from None


def _bounds(section: Mapping[str, Any], source: str) -> tuple[int, int]:
    hf_size = section.get("size") or {}
    if not isinstance(hf_size, dict):
        raise ValueError(f"{source}: size={hf_size!r} must have shortest_edge and longest_edge, both in pixels of area")
    return (
        _bound(section, hf_size, "min_pixels", "shortest_edge", source),
        _bound(section, hf_size, "max_pixels", "longest_edge", source),
    )


def _bound(section: Mapping[str, Any], hf_size: Mapping[str, Any], old_key: str, key: str, source: str) -> int:
    """One bound under its three spellings; real files have several of them, some null."""
    spelled = {f"size.{key}": hf_size.get(key), f"size.{old_key}": hf_size.get(old_key), old_key: section.get(old_key)}
    values_by_name = {name: value for name, value in spelled.items() if value is not None}
    if not values_by_name:
        raise ValueError(f"{source}: size.{key} (or {old_key}) is missing; set it, in pixels of area")
    for name, value in values_by_name.items():
        _require_count(f"{source}: {name}", value)
        if value > MAX_PIXELS:
            raise ValueError(f"{source}: {name}={value} must be at most {MAX_PIXELS}")
    if len(set(values_by_name.values())) > 1:
        values = " and ".join(f"{name}={value}" for name, value in values_by_name.items())
        raise ValueError(f"{source}: {values} contradict each other, and readers disagree on the valid one; keep one")
    return next(iter(values_by_name.values()))


def _require_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be a whole number, 1 or more")


def _require_bounds(min_name: str, min_pixels: int, max_name: str, max_pixels: int) -> None:
    _require_count(min_name, min_pixels)
    _require_count(max_name, max_pixels)
    if min_pixels > max_pixels:
        raise ValueError(f"{min_name}={min_pixels} exceeds {max_name}={max_pixels}; lower one or raise the other")


def _require_area(height: int, width: int) -> None:
    if height < 1 or width < 1:
        raise ValueError(f"an image must have at least one pixel, got height {height}, width {width}")


def _require_shape(height: int, width: int) -> None:
    _require_area(height, width)
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        raise ValueError(
            f"the longer side of an image may be at most {MAX_ASPECT_RATIO} times the shorter, "
            f"got height {height}, width {width} ({ratio:.1f} times); crop it"
        )


def _require_placeholders(num_placeholders: int, num_given: int, token_id: int, kind: str) -> None:
    if num_placeholders != num_given:
        raise ValueError(
            f"the ids have {num_placeholders} placeholders (token {token_id}), got {num_given} of: {kind}; "
            f"write one placeholder for each, not yet expanded"
        )
