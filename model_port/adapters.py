"""LoRA adapters in memory and on disk, in PEFT's format.

    DIR/adapter_config.json         rank, alpha, adapted modules, and the path of the base model
    DIR/adapter_model.safetensors   the A and B matrices
    DIR/paravt_jax.json             our addition: the base model's dtype, checksum and settings

An adapter is only valid with the weights, RoPE and tokenizer that it was trained with. This file therefore has a
checksum of the base weights and the settings in the base model's files. Both are compared when an adapter and a base
model are loaded together; the weights only if they are not loaded in a narrower dtype than in training. Adapters of
other programs have neither.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import xxhash
from flax import nnx
from jax.sharding import Mesh

from model_port.config import DTYPES, FAMILIES, LoraConfig, ModelConfig, read_config
from model_port.hf_files import PROCESSOR_FILE, TEMPLATE_FILE, TOKENIZER_FILE, read_side_files
from model_port.json_files import Section, flattened, parse_object, read_object
from model_port.layout import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BASE_KEY, INFO_FILE, base_of
from model_port.lora import LowRank, Projection, merged
from model_port.model import VLModel
from model_port.processing import FLAT_FILES, VisionContract
from model_port.safetensors_io import HfTensors, safetensors_writer
from model_port.sharding import flat_params, on_host, shard_abstract
from model_port.weights import PEFT_PREFIX, TEXT_MODULE, adapter_rules, hf_tensors, rules

FORMAT_VERSION = 1
MAX_LISTED = 5  # differences in an error message
MAX_RANK, MIN_ALPHA, MAX_ALPHA = 4096, 1e-6, 1e6
SUPPORTED = {  # PEFT settings that change the computation without changing a tensor
    "peft_type": "LORA",
    "use_rslora": False,
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "layer_replication": None,
}
VISION_MODULES = r"(.*\.)?visual\..*"  # in Qwen2.5-VL, their MLPs have the names of the language layers' MLPs
CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # PEFT's initializations that change the base weights


@dataclass(frozen=True)
class AdapterBase:
    """The base model of an adapter, as it was in training."""

    name: str  # a directory or a hub id
    dtype: str | None = None  # of the base weights in training; None if another program made the adapter
    sum: str | None = None  # checksum of the base weights in this dtype
    # From `files_of_base`; None in older adapters and in those of other programs.
    files: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter's rank and scale, and its base model."""

    lora: LoraConfig
    base: AdapterBase


def new_adapter(config: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, np.ndarray]:
    """Initializes an adapter as PEFT does: A is uniform within ±1 / sqrt(inputs), B is zero."""
    random, shapes = np.random.default_rng(seed), adapter_shapes(config, lora.rank)
    params = {}
    for a, b in adapter_rules(config, lora.rank).values():
        bound = np.float32(a.hf_shape[1] ** -0.5)
        params[a.path] = bound * (2 * random.random(shapes[a.path], np.float32) - 1)
        params[b.path] = np.zeros(shapes[b.path], np.float32)
    return params


def adapter_shapes(config: ModelConfig, rank: int) -> dict[str, tuple[int, ...]]:
    text = config.text
    sizes = {"n": text.num_heads, "k": text.num_kv_heads, "h": text.head_dim, "d": text.width, "f": text.ffn_width}
    sizes["z"] = rank
    paths = [side.path for pair in adapter_rules(config, rank).values() for side in pair]
    return {path: (text.num_layers, *(sizes[axis] for axis in path.rpartition("_")[2])) for path in paths}


def add_adapter(model: VLModel, lora: LoraConfig, params: Mapping[str, Any], mesh: Mesh | None = None) -> None:
    """Adds an adapter to the model's language layers, in place. `params` maps paths to arrays or shapes."""
    shapes = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in params.items()}
    shapes_on_mesh = shapes if mesh is None else shard_abstract(shapes, mesh)

    def leaf(path: str) -> Any:
        array, target = params[path], shapes_on_mesh[path]
        return target if isinstance(array, jax.ShapeDtypeStruct) else jax.device_put(array, target.sharding)

    for path, (a, b) in adapter_rules(model.config, lora.rank).items():
        *_, part, kernel = path.split(".")
        projection: Projection = getattr(getattr(model.text.layers, part), kernel.partition("_")[0])
        projection.lora = LowRank(projection.layout, leaf(a.path), leaf(b.path), lora.scale)
    model.lora = lora


def merged_tensors(model: VLModel) -> Iterator[tuple[str, jax.Array]]:
    """Yields the tensors of a model's files with its adapter merged in, one at a time."""
    params = flat_params(nnx.state(model, nnx.Param))
    return with_adapter(hf_tensors(model.config, params), model.config, model.lora, params)


def with_adapter(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig, lora: LoraConfig, params: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """Yields a model's tensors with an adapter merged in."""
    pairs = adapter_rules(config, lora.rank)
    pair_of_tensor = {
        name: (pairs[rule.path], layer)
        for rule in rules(config)
        if rule.path in pairs
        for layer, name in enumerate(rule.hf_names)
    }
    for name, tensor in tensors:
        if name in pair_of_tensor:
            pair, layer = pair_of_tensor[name]
            tensor = merged(tensor, *(side.tensor(params, layer) for side in pair), lora.scale)
        yield name, tensor


def base_checksum(model: VLModel, dtype: str) -> str:
    """Computes the checksum of a model's base weights in a dtype, without adapters, in the order of the files."""
    current = xxhash.xxh3_128()
    for _, tensor in hf_tensors(model.config, flat_params(nnx.state(model, nnx.Param))):
        update_checksum(current, on_host(tensor.astype(dtype)))
    return current.hexdigest()


def update_checksum(current: xxhash.xxh3_128, tensor: np.ndarray) -> None:
    current.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def check_base(adapter: str | Path, base: AdapterBase, current: str) -> None:
    """Raises if `current`, the checksum of the loaded base weights, differs from the one in training."""
    if base.sum not in (None, current):
        raise ValueError(
            f"{adapter} was trained with other weights than {base.name} has now: restore the old weights, or set "
            f"{BASE_KEY} in a copy of the adapter to their path"
        )


def files_of_base(hf_dir: Path) -> dict[str, Any]:
    """Returns all settings, besides weights, that change a model's outputs or how text and images become inputs."""
    files = read_side_files(hf_dir)
    config = asdict(read_config(hf_dir))
    del config["initializer_range"], config["text"]["max_positions"]  # these change no output
    current = flattened({"config": config})
    if any(name in files for name in (PROCESSOR_FILE, FLAT_FILES["image_processor"])):
        current |= flattened({"processor": asdict(VisionContract.from_hf(hf_dir))})
    tokenizer = files.get(TOKENIZER_FILE)
    if tokenizer is not None:  # its parsed content, because saving it again may change the file's formatting
        tokenizer = json.dumps(parse_object(tokenizer, hf_dir / TOKENIZER_FILE), sort_keys=True).encode()
    for name, content in ((TOKENIZER_FILE, tokenizer), (TEMPLATE_FILE, files.get(TEMPLATE_FILE))):
        current[name] = None if content is None else f"xxh3 {xxhash.xxh3_128(content).hexdigest()}"
    return json.loads(json.dumps(current))  # makes lists of tuples, as in the recorded file


def check_base_files(adapter: str | Path, base: AdapterBase, current: Mapping[str, Any] | None) -> None:
    """Raises if `current`, the settings of the loaded base model, differ from the settings in training."""
    if base.files is None or current is None:
        return
    differ = [f"{key} is {current.get(key)}, was {was}" for key, was in base.files.items() if current.get(key) != was]
    if differ:
        raise ValueError(
            f"{adapter} was trained when {len(differ)} values in the files of {base.name} were different: "
            f"{'; '.join(differ[:MAX_LISTED])}; restore them, or, if you changed them on purpose, remove base.files "
            f"from {INFO_FILE} in a copy of the adapter"
        )


def write_adapter(directory: Path, config: ModelConfig, info: AdapterInfo, params: Mapping[str, np.ndarray]) -> None:
    """Writes an adapter in PEFT's format. `params` maps paths to arrays in the dtype to write."""
    table = [side for pair in adapter_rules(config, info.lora.rank).values() for side in pair]
    modules = sorted({side.hf.split(".")[-3] for side in table})
    shapes = {name: (params[rule.path].dtype, rule.hf_shape) for rule in table for name in rule.hf_names}
    with safetensors_writer(directory / ADAPTER_FILE, shapes) as write:
        for rule in table:
            for layer in range(config.text.num_layers):
                write(np.asarray(rule.tensor(params, layer)))
    _write_json(directory / INFO_FILE, {"format_version": FORMAT_VERSION, "base": asdict(info.base)})
    _write_json(
        directory / ADAPTER_CONFIG_FILE,
        {
            **SUPPORTED,
            "task_type": "CAUSAL_LM",
            BASE_KEY: info.base.name,
            "r": info.lora.rank,
            "lora_alpha": info.lora.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": modules,
            "exclude_modules": VISION_MODULES,
            "inference_mode": True,
        },
    )


def read_adapter_info(directory: Path) -> AdapterInfo:
    path, info_file = directory / ADAPTER_CONFIG_FILE, directory / INFO_FILE
    peft = Section(str(path), read_object(path))
    for key, supported in (SUPPORTED | {"alora_invocation_tokens": None}).items():
        if peft.values.get(key):
            peft.expect(key, supported)
    initial = str(peft.values.get("init_lora_weights"))
    if initial.lower().startswith(CHANGE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights={initial!r} also changed weights of the base model; save the adapter with "
            f"PEFT's path_initial_model_for_weight_conversion"
        )
    recorded = read_object(info_file) if info_file.is_file() else {"base": {}}
    trained = Section(str(info_file), recorded).section("base")
    dtype, sum_ = (trained.text(key) if trained.has(key) else None for key in ("dtype", "sum"))
    if dtype not in (None, *DTYPES):
        raise trained.wrong("dtype", f"one of {', '.join(DTYPES)}")
    lora = LoraConfig(peft.count("r", MAX_RANK), peft.number("lora_alpha", MIN_ALPHA, MAX_ALPHA))
    files = trained.section("files").values if trained.has("files") else None
    return AdapterInfo(lora, AdapterBase(base_of(directory), dtype, sum_, files))


def read_adapter(directory: Path, config: ModelConfig, rank: int) -> dict[str, np.ndarray]:
    """Reads an adapter's arrays by path, in float32.

    Kernels that have no adapter in the file get zeros, which stay zero in training.
    """
    pair_of_tensor = {
        name: (side, layer)
        for pair in adapter_rules(config, rank).values()
        for side in pair
        for layer, name in enumerate(side.hf_names)
    }
    with HfTensors(directory, ADAPTER_FILE) as tensors:
        published = PEFT_PREFIX + FAMILIES[config.family].text_names  # names in adapters from before transformers 4.52
        tensors.rename(f"{published}layers.", f"{PEFT_PREFIX}{TEXT_MODULE}layers.")
        for name, shape in tensors.shapes.items():
            if name not in pair_of_tensor or pair_of_tensor[name][0].hf_shape != shape:
                raise ValueError(
                    f"{directory / ADAPTER_FILE}: {name} {shape} is not a rank-{rank} adapter of a projection in the "
                    f"language layers, and only those are supported"
                )
        params = {path: np.zeros(shape, np.float32) for path, shape in adapter_shapes(config, rank).items()}
        for name in tensors.shapes:
            side, layer = pair_of_tensor[name]
            side.tensor(params, layer)[...] = tensors.read(name)
    return params


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
