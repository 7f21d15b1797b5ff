"""Loads a model from a path, and computes the logits of one sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float, Int

from model_port.adapters import (
    add_adapter,
    base_checksum,
    check_base,
    check_base_files,
    files_of_base,
    read_adapter,
    read_adapter_info,
)
from model_port.bucket import is_address
from model_port.config import DTYPES, ModelConfig, VisionConfig, read_config
from model_port.inputs import (
    Frame,
    RowSequence,
    TextBatch,
    Tokens,
    VisionBatch,
    bucket,
    checked_ids,
    order_frames,
    pack_text,
    pack_vision,
    split_frames,
)
from model_port.json_files import Section, read_object
from model_port.layers import DEFAULT_COMPUTE, Compute, ComputeDtype
from model_port.layout import ADAPTER_CONFIG_FILE, BASE_KEY, HF_DIR, base_of, hf_files_of, is_adapter, is_checkpoint
from model_port.model import VLModel
from model_port.sharding import flat_params, param_name, platform, shard_abstract, with_all_axes
from model_port.weights import check_param_paths, load_hf_params, open_hf_tensors, stored_dtype

TOKEN_BUCKET = 64  # lengths are rounded up to a multiple of this, to share compiled programs


def abstract_model(config: ModelConfig, compute: Compute = DEFAULT_COMPUTE) -> VLModel:
    """Returns a model that has shapes instead of arrays, and so needs no memory."""
    return nnx.merge(*_abstract(config, compute))


@cache
def _abstract(config: ModelConfig, compute: Compute) -> tuple[nnx.GraphDef[VLModel], nnx.State]:
    """Returns the parts of an abstract model. They are cached, because tracing the initialization takes a while."""
    return nnx.split(nnx.eval_shape(lambda: VLModel(config, compute=compute, rngs=nnx.Rngs(0))))


def abstract_params(model: VLModel, dtype: str, mesh: Mesh | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape, dtype and sharding of every parameter to load, by path."""
    shapes = flat_params(nnx.state(model, nnx.Param))
    typed = {path: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(dtype)) for path, leaf in shapes.items()}
    return typed if mesh is None else shard_abstract(typed, mesh)


def with_params(model: VLModel, params: Mapping[str, jax.Array | jax.ShapeDtypeStruct]) -> VLModel:
    """Returns the model with the given arrays or shapes as its parameters. Raises if any are missing."""
    graphdef, state = nnx.split(model)
    check_param_paths(model.config, set(params))
    flat = [(path, leaf.replace(params[param_name(path)])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graphdef, nnx.from_flat_state(flat))


def load(path: str | Path, dtype: str = "float32", mesh: Mesh | None = None) -> VLModel:
    """Loads a Hugging Face directory, a converted checkpoint or an adapter, with parameters in `dtype`, over `mesh`.

    `path` may be in a bucket (gs://…). Activations have the same dtype, unless you replace `model.compute`. An adapter
    is loaded together with its base model and stays in float32. Make `mesh` with `make_mesh`, or pass any mesh with
    some of its axes. Raises ValueError if there is no valid model.
    """
    mesh = None if mesh is None else with_all_axes(mesh)
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    if is_address(path):
        from model_port.download import local_directory  # imported late, because it imports the hub's client

        path = local_directory(path)
    path = Path(path)
    if is_adapter(path):
        return _load_adapted(path, dtype, mesh)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; give a Hugging Face directory or a converted checkpoint")
    config = read_config(hf_files_of(path))
    model = abstract_model(config, Compute(dtype=dtype))
    abstract = abstract_params(model, dtype, mesh)
    if is_checkpoint(path):
        from model_port.checkpoint import restore_params  # imported late, because orbax takes a second

        return with_params(model, restore_params(path, abstract))
    with open_hf_tensors(path, config) as tensors:
        return with_params(model, load_hf_params(tensors, config, abstract, jnp.dtype(dtype)))


def load_computing(path: str | Path, dtype: ComputeDtype) -> VLModel:
    """Loads a model that computes in `dtype`. For float32, a Hugging Face model's weights keep their stored dtype."""
    path = Path(path)
    as_stored = dtype == "float32" and not (is_adapter(path) or is_checkpoint(path))
    model = load(path, stored_dtype(path) if as_stored else dtype)
    model.compute = replace(model.compute, dtype=dtype)
    return model


def _load_adapted(path: Path, dtype: str, mesh: Mesh | None) -> VLModel:
    info, base = read_adapter_info(path), base_directory(path)
    check_base_files(path, info.base, info.base.files and files_of_base(hf_files_of(base)))
    model = load(base, dtype, mesh)
    # If the dtype is narrower than in training, the weights cannot be compared.
    if info.base.dtype is not None and jnp.promote_types(dtype, info.base.dtype) == jnp.dtype(dtype):
        check_base(path, info.base, base_checksum(model, info.base.dtype))
    add_adapter(model, info.lora, read_adapter(path, model.config, info.lora.rank), mesh)
    return model


def files_directory(path: Path, *, weights: bool = True) -> Path:
    """Returns the directory of config, tokenizer and processor; for an adapter without one, its base model's."""
    alone = is_adapter(path) and not (path / HF_DIR).is_dir()
    return hf_files_of(base_directory(path, weights=weights) if alone else path)


def base_directory(adapter: Path, *, weights: bool = True) -> Path:
    """Returns the directory of an adapter's base model; downloads the model if it is a hub id."""
    from model_port.download import source_directory  # imported late, because it imports the hub's client

    base, file = base_of(adapter), adapter / ADAPTER_CONFIG_FILE
    revision = Section(str(file), read_object(file)).text("revision", "main")
    if revision != "main" and not Path(base).is_dir():
        raise ValueError(
            f"{file}: revision={revision!r} of {base} is not downloaded; run `hf download {base} --revision {revision} "
            f"--local-dir DIR` and set {BASE_KEY} to DIR"
        )
    try:
        directory = source_directory(base, f"{BASE_KEY}=DIR in {file}", weights=weights)
    except ValueError as problem:
        raise ValueError(f"{BASE_KEY} of {file}: {problem}; put the model there, or correct the path") from None
    if is_adapter(directory):
        raise ValueError(f"{BASE_KEY} of {file} is {directory}, which is an adapter itself; name its base model")
    return directory


def logits(
    model: VLModel,
    input_ids: Int[np.ndarray, "*batch T"],
    pixel_values: Float[np.ndarray, "P C"] | None = None,
    image_grid_thw: Int[np.ndarray, "n 3"] | None = None,
    pixel_values_videos: Float[np.ndarray, "P2 C"] | None = None,
    video_grid_thw: Int[np.ndarray, "n2 3"] | None = None,
    second_per_grid_ts: Sequence[float] | Float[np.ndarray, " n2"] | None = None,
    *,
    tokens: Int[np.ndarray, " rows"] | None = None,
) -> Float[np.ndarray, "rows V"]:
    """Computes the logits of one sequence from the outputs of Hugging Face's processor (placeholders expanded).

    `tokens` are the positions whose logits are computed, negative ones counted from the end (default: all). Raises
    IndexError if the sequence does not have them.
    """
    rows = None if tokens is None else np.arange(np.size(input_ids))[tokens]
    media = pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts
    text, vision = one_sequence(model.config, input_ids, *media)
    graphdef, params = nnx.split(model)
    dtypes = {jnp.dtype(model.compute.dtype), *(leaf.dtype for leaf in jax.tree.leaves(params))}
    widened = platform() == "cpu" and min(dtype.itemsize for dtype in dtypes) < 4
    computed = (_logits_by_layer if widened else _logits)(graphdef, params, text, vision, rows)[0]
    # A copy, because on a CPU asarray returns a view that keeps the device's array alive.
    return np.array(computed[: np.size(input_ids)] if rows is None else computed)


def one_sequence(
    config: ModelConfig,
    input_ids: Int[np.ndarray, "*batch T"],
    pixel_values: Float[np.ndarray, "P C"] | None = None,
    image_grid_thw: Int[np.ndarray, "n 3"] | None = None,
    pixel_values_videos: Float[np.ndarray, "P2 C"] | None = None,
    video_grid_thw: Int[np.ndarray, "n2 3"] | None = None,
    second_per_grid_ts: Sequence[float] | Float[np.ndarray, " n2"] | None = None,
) -> tuple[TextBatch, VisionBatch | None]:
    """Returns a model's inputs for a single sequence, which is alone in its row."""
    ids = checked_ids(config, input_ids)
    media = pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw, second_per_grid_ts
    frames = frames_of(config, ids, *media)
    vision, first_rows = None, []
    if frames:
        row_patches = max(len(frame.patches) for frame in frames)
        vision, first_rows = pack_vision(frames, config.vision, row_patches)
    sequence = RowSequence(Tokens(ids, tuple(range(len(frames)))))
    text = pack_text([[sequence]], frames, first_rows, config, bucket(len(ids), TOKEN_BUCKET))
    return jax.tree.map(jnp.asarray, (text, vision))


def frames_of(
    config: ModelConfig,
    ids: Int[np.ndarray, "*batch T"],
    pixel_values: Float[np.ndarray, "P C"] | None = None,
    image_grid_thw: Int[np.ndarray, "n 3"] | None = None,
    pixel_values_videos: Float[np.ndarray, "P2 C"] | None = None,
    video_grid_thw: Int[np.ndarray, "n2 3"] | None = None,
    second_per_grid_ts: Sequence[float] | Float[np.ndarray, " n2"] | None = None,
) -> tuple[Frame, ...]:
    """Returns the frames of a processor's output in the order of their placeholders, for a `SamplerPrompt`."""
    for patches in (pixel_values, pixel_values_videos):
        if patches is not None and np.shape(patches)[1:] != (config.vision.patch_values,):
            raise ValueError(f"pixel values of shape {np.shape(patches)}, expected [P, {config.vision.patch_values}]")
    images = split_frames(pixel_values, image_grid_thw)
    intervals = _intervals(config.vision, 0 if video_grid_thw is None else len(video_grid_thw), second_per_grid_ts)
    frames = images + split_frames(pixel_values_videos, video_grid_thw, intervals)
    for down, across in (frame.grid for frame in frames):
        if min(down, across) < 1 or down % config.vision.merge or across % config.vision.merge:
            raise ValueError(
                f"grid_thw has a frame of {down} x {across} patches, expected positive multiples of the merge size "
                f"{config.vision.merge}; resize pictures with the model's own processor"
            )
    sizes = [len(frame.patches) // config.vision.merge_unit for frame in frames]
    order = order_frames(checked_ids(config, ids), range(len(images)), range(len(images), len(frames)), sizes, config)
    return tuple(frames[number] for number in order)


def _intervals(
    config: VisionConfig, num_videos: int, seconds: Sequence[float] | Float[np.ndarray, " n"] | None
) -> list[float] | None:
    """Returns each video's number of positions from frame to frame; None if prompts write frame times as text."""
    if seconds is not None and (not config.tokens_per_second or len(seconds) != num_videos):
        raise ValueError(
            f"second_per_grid_ts has {len(seconds)} values, expected one for each of {num_videos} videos, and none "
            f"for a model whose prompts write the times of frames as text"
        )
    if not config.tokens_per_second:
        return None
    return [config.tokens_per_second * float(s) for s in ([1.0] * num_videos if seconds is None else seconds)]


def _logits_of(
    graphdef: nnx.GraphDef[VLModel],
    params: nnx.State,
    text: TextBatch,
    vision: VisionBatch | None,
    tokens: Int[Any, " rows"] | None,
) -> jax.Array:
    model = nnx.merge(graphdef, params)
    hidden = model.hidden(text, None if vision is None else model.encode_vision(vision))
    return model.text.logits(hidden if tokens is None else hidden[:, tokens])


_logits = jax.jit(_logits_of, static_argnums=0)
# A CPU casts 16-bit kernels to float32. Without this option, XLA casts all layers before the loop over layers.
PER_LAYER: dict[str, str | bool] = {"xla_disable_hlo_passes": "while-loop-invariant-code-motion"}
_logits_by_layer = jax.jit(_logits_of, static_argnums=0, compiler_options=PER_LAYER)
