"""Adapters beside a model and on disk, in the format of PEFT.

    DIR/adapter_config.json         rank, alpha, what is adapted, and where the base is
    DIR/adapter_model.safetensors   the pairs
    DIR/paravt_jax.json             of ours: dtype and sum of the base's weights, settings of its files

An adapter means nothing beside other weights than it was trained with, or with another rope or tokenizer. So ours have
a sum of the weights and the settings of the files beside them, which are compared wherever the two come together again.
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

from model_port.config import LoraConfig, ModelConfig, config_from_hf, read_hf_config
from model_port.hf_files import CONFIG_FILE, PROCESSOR_FILE, TEMPLATE_FILE, TOKENIZER_FILE, read_side_files
from model_port.json_files import Section, parse_object, read_object
from model_port.layout import ADAPTER_CONFIG_FILE, ADAPTER_FILE, BASE_KEY, INFO_FILE, base_of, read_adapter_config
from model_port.lora import LowRank, Projection, merged
from model_port.model import Qwen3VL
from model_port.processing import FLAT_FILES, VisionContract
from model_port.safetensors_io import HfTensors, SafetensorsWriter
from model_port.sharding import flat_params, on_host, shard_abstract
from model_port.weights import adapter_rules, hf_tensors, rules

FORMAT_VERSION = 1
DTYPES = ("float32", "bfloat16", "float16")
MAX_LISTED = 5  # differences in a message
MAX_RANK, MIN_ALPHA, MAX_ALPHA = 4096, 1e-6, 1e6
SUPPORTED = {  # settings of PEFT that change what is computed, and show in no tensor
    "peft_type": "LORA",
    "use_rslora": False,
    "alpha_pattern": {},
    "fan_in_fan_out": False,
    "layer_replication": None,
}


@dataclass(frozen=True)
class AdapterBase:
    """The weights that an adapter belongs to."""

    name: str  # a directory, or an id on the hub
    dtype: str | None = None  # that they had beside it; None: not known, as of an adapter that another program made
    sum: str | None = None  # of their bytes in this dtype
    files: Mapping[str, Any] | None = None  # `files_of_base`; None: of an adapter from before these were recorded


@dataclass(frozen=True)
class AdapterInfo:
    lora: LoraConfig
    base: AdapterBase


def new_adapter(config: ModelConfig, lora: LoraConfig, seed: int) -> dict[str, np.ndarray]:
    """A is uniform within 1 / sqrt(inputs), as PEFT begins; B is zero."""
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


def add_adapter(model: Qwen3VL, lora: LoraConfig, params: Mapping[str, Any], mesh: Mesh | None = None) -> None:
    """Puts a pair beside every kernel of the language layers; `params` are arrays by path, or shapes."""
    shapes = {path: jax.ShapeDtypeStruct(array.shape, array.dtype) for path, array in params.items()}
    placed = shapes if mesh is None else shard_abstract(shapes, mesh)

    def leaf(path: str) -> Any:
        array, place = params[path], placed[path]
        return place if isinstance(array, jax.ShapeDtypeStruct) else jax.device_put(array, place.sharding)

    for path, (a, b) in adapter_rules(model.config, lora.rank).items():
        *_, part, kernel = path.split(".")
        projection: Projection = getattr(getattr(model.text.layers, part), kernel.partition("_")[0])
        projection.lora = LowRank(projection.layout, leaf(a.path), leaf(b.path), lora.scale)
    model.lora = lora


def merged_tensors(model: Qwen3VL) -> Iterator[tuple[str, jax.Array]]:
    """A model as the tensors of its files, with what its adapter adds to each: one at a time, never a model."""
    params = flat_params(nnx.state(model, nnx.Param))
    return with_adapter(hf_tensors(model.config, params), model.config, model.lora, params)


def with_adapter(
    tensors: Iterable[tuple[str, Any]], config: ModelConfig, lora: LoraConfig, params: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The tensors of a model, each with what the adapter adds to it."""
    pairs = adapter_rules(config, lora.rank)
    places = {
        name: (pairs[rule.path], layer)
        for rule in rules(config)
        if rule.path in pairs
        for layer, name in enumerate(rule.hf_names)
    }
    for name, tensor in tensors:
        if name in places:
            pair, layer = places[name]
            tensor = merged(tensor, *(side.tensor(params, layer) for side in pair), lora.scale)
        yield name, tensor


def sum_of_base(model: Qwen3VL, dtype: str) -> str:
    """Of a model's own weights in a dtype, tensor by tensor as in the files, whatever lies beside them."""
    found = xxhash.xxh3_128()
    for _, tensor in hf_tensors(model.config, flat_params(nnx.state(model, nnx.Param))):
        add_to_sum(found, on_host(tensor.astype(dtype)))
    return found.hexdigest()


def add_to_sum(found: xxhash.xxh3_128, tensor: np.ndarray) -> None:
    found.update(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def check_base(adapter: str | Path, base: AdapterBase, found: str) -> None:
    """`found` is the sum of the weights that the adapter is about to lie beside."""
    if base.sum not in (None, found):
        raise ValueError(
            f"{adapter} was trained beside the weights of {base.name} as they were then, and these are others: "
            f"put the same weights there, or name their place as {BASE_KEY} in a copy of the adapter"
        )


def files_of_base(hf_dir: Path) -> dict[str, Any]:
    """What else decides what a model computes, and how texts and pictures become its inputs, by name."""
    files = read_side_files(hf_dir)
    config = asdict(config_from_hf(read_hf_config(hf_dir), str(hf_dir / CONFIG_FILE)))
    del config["initializer_range"], config["text"]["max_positions"]  # of which nothing that is computed depends
    found = _flat({"config": config})
    if any(name in files for name in (PROCESSOR_FILE, FLAT_FILES["image_processor"])):
        found |= _flat({"processor": asdict(VisionContract.from_hf(hf_dir))})
    tokenizer = files.get(TOKENIZER_FILE)
    if tokenizer is not None:  # by its content: who saves it again may lay it out otherwise
        tokenizer = json.dumps(parse_object(tokenizer, hf_dir / TOKENIZER_FILE), sort_keys=True).encode()
    for name, content in ((TOKENIZER_FILE, tokenizer), (TEMPLATE_FILE, files.get(TEMPLATE_FILE))):
        found[name] = None if content is None else f"xxh3 {xxhash.xxh3_128(content).hexdigest()}"
    return json.loads(json.dumps(found))  # with lists for tuples, as it is recorded


def check_base_files(adapter: str | Path, base: AdapterBase, found: Mapping[str, Any] | None) -> None:
    """`found` is the same of the model that the adapter is about to lie beside."""
    if base.files is None or found is None:
        return
    differ = [f"{key} is {found.get(key)}, was {was}" for key, was in base.files.items() if found.get(key) != was]
    if differ:
        raise ValueError(
            f"{adapter} was trained beside {base.name} with other files, of which {len(differ)} values differ: "
            f"{'; '.join(differ[:MAX_LISTED])}; put them back, or, where they are meant, remove base.files from "
            f"{INFO_FILE} in a copy of the adapter"
        )


def write_adapter(directory: Path, config: ModelConfig, info: AdapterInfo, params: Mapping[str, np.ndarray]) -> None:
    """`params` are by path, in the dtype that they are to have on disk."""
    table = [side for pair in adapter_rules(config, info.lora.rank).values() for side in pair]
    modules = sorted({side.hf.split(".")[-3] for side in table})
    shapes = {name: (params[rule.path].dtype, rule.hf_shape) for rule in table for name in rule.hf_names}
    with SafetensorsWriter(directory / ADAPTER_FILE, shapes) as file:
        for rule in table:
            for layer in range(config.text.num_layers):
                file.write(np.asarray(rule.tensor(params, layer)))
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
            "inference_mode": True,
        },
    )


def read_adapter_info(directory: Path) -> AdapterInfo:
    path, known = directory / ADAPTER_CONFIG_FILE, directory / INFO_FILE
    said = Section(str(path), read_adapter_config(directory))
    for key, supported in SUPPORTED.items():
        if said.values.get(key):
            said.expect(key, supported)
    if missing := [key for key in ("r", "lora_alpha") if not said.has(key)]:
        raise ValueError(f"{path} does not say {', '.join(missing)}")
    trained = Section(str(known), read_object(known)).section("base") if known.is_file() else Section(str(known), {})
    dtype, sum_ = (trained.text(key) if trained.has(key) else None for key in ("dtype", "sum"))
    if dtype not in (None, *DTYPES):
        raise trained.wrong("dtype", f"one of {', '.join(DTYPES)}")
    lora = LoraConfig(said.count("r", MAX_RANK), said.number("lora_alpha", MIN_ALPHA, MAX_ALPHA))
    files = trained.section("files").values if trained.has("files") else None
    return AdapterInfo(lora, AdapterBase(base_of(directory), dtype, sum_, files))


def read_adapter(directory: Path, config: ModelConfig, rank: int) -> dict[str, np.ndarray]:
    """The pairs by path, in float32. Kernels that it says nothing of have zeros, which stay zeros in training."""
    places = {
        name: (side, layer)
        for pair in adapter_rules(config, rank).values()
        for side in pair
        for layer, name in enumerate(side.hf_names)
    }
    with HfTensors(directory, ADAPTER_FILE) as tensors:
        for name, shape in tensors.shapes.items():
            if name not in places or places[name][0].hf_shape != shape:
                raise ValueError(
                    f"{directory / ADAPTER_FILE}: {name} {shape} is no adapter of rank {rank} of a kernel of the "
                    f"language layers, which are the only ones here"
                )
        params = {path: np.zeros(shape, np.float32) for path, shape in adapter_shapes(config, rank).items()}
        for name in tensors.shapes:
            side, layer = places[name]
            side.tensor(params, layer)[...] = tensors.read(name)
    return params


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": x}} as {"a.b": x}."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
