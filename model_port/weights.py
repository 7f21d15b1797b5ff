"""The table of Hugging Face tensor names and our parameters, used in both directions.

Our kernels keep the Hugging Face files' memory order, output axes first (`q_kernel_nhd` is `q_proj.weight` with its
rows split into heads). A parameter is therefore its tensor reshaped, or its layers' tensors stacked and reshaped.
Nothing is transposed, conversion copies bytes, and the inverse needs no second table.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from model_port.config import FAMILIES, ModelConfig, TextConfig
from model_port.lora import layout_sides
from model_port.qwen2_5_vl import weights as qwen2_5_vl
from model_port.qwen3_vl import weights as qwen3_vl
from model_port.rule import Rule as Rule
from model_port.safetensors_io import HfTensors, copy_cast

VISION_RULES: dict[str, Callable[[Any, str], list[Rule]]] = {
    "qwen3_vl": qwen3_vl.vision_rules,
    "qwen3_vl_moe": qwen3_vl.vision_rules,
    "qwen2_5_vl": qwen2_5_vl.vision_rules,
}
HEAD = "lm_head.weight"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Prefixes of the language and the vision tower's tensor names in transformers' modules and in the files that it writes.
TEXT_MODULE, VISION_MODULE = "model.language_model.", "model.visual."
PEFT_PREFIX = "base_model.model."  # precedes the name of the adapted tensor
ADAPTED = re.compile(r"(text\.layers\..*)_kernel_([a-z]+)")
ALIGNMENT_BYTES = 64  # jax on a CPU uses arrays with this alignment without a copy
MAX_LISTED = 10  # tensors in an error message
READERS = 4  # threads that read the layers of a parameter
READ_BLOCK_BYTES = 64 * 2**20  # block size if only some columns of a tensor are needed


def rules(config: ModelConfig) -> list[Rule]:
    """Returns the weight table of an architecture, with the published names."""
    tower = VISION_RULES[config.family](config.vision, FAMILIES[config.family].vision_names)
    return [*tower, *_text_rules(config)]


def module_name(config: ModelConfig, name: str) -> str:
    """Converts a tensor's published name to its name in transformers' modules."""
    family = FAMILIES[config.family]
    for prefix, module in ((family.vision_names, VISION_MODULE), (family.text_names, TEXT_MODULE)):
        if name.startswith(prefix):
            return module + name.removeprefix(prefix)
    return name


def embedding_name(config: ModelConfig) -> str:
    return FAMILIES[config.family].text_names + "embed_tokens.weight"


def _text_rules(config: ModelConfig) -> list[Rule]:
    c, names = config.text, FAMILIES[config.family].text_names
    hf, ours, count = names + "layers.{i}.", "text.layers.", c.num_layers
    q_rows, kv_rows = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    table = [
        Rule(embedding_name(config), "text.embed.table_vd", (c.vocab_size, c.width)),
        Rule(hf + "input_layernorm.weight", ours + "input_norm.scale", (c.width,), count),
        Rule(hf + "self_attn.q_proj.weight", ours + "attn.q_kernel_nhd", (q_rows, c.width), count),
        Rule(hf + "self_attn.k_proj.weight", ours + "attn.k_kernel_khd", (kv_rows, c.width), count),
        Rule(hf + "self_attn.v_proj.weight", ours + "attn.v_kernel_khd", (kv_rows, c.width), count),
        Rule(hf + "self_attn.o_proj.weight", ours + "attn.o_kernel_dnh", (c.width, q_rows), count),
    ]
    if c.qkv_bias:
        table += [
            Rule(hf + f"self_attn.{name}_proj.bias", f"{ours}attn.{name}_bias", (rows,), count)
            for name, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows))
        ]
    if c.qk_norm:
        table += [
            Rule(hf + f"self_attn.{name}_norm.weight", f"{ours}attn.{name}_norm.scale", (c.head_dim,), count)
            for name in ("q", "k")
        ]
    table += [
        Rule(hf + "post_attention_layernorm.weight", ours + "mlp_norm.scale", (c.width,), count),
        *_mlp_rules(c, hf, ours),
        Rule(names + "norm.weight", "text.final_norm.scale", (c.width,)),
    ]
    if not config.tie_embeddings:
        table.append(Rule(HEAD, "text.head.kernel_vd", (c.vocab_size, c.width)))
    return table


def _mlp_rules(c: TextConfig, hf: str, ours: str) -> list[Rule]:
    count, width, ffn, experts = c.num_layers, c.width, c.ffn_width, c.num_experts
    if not experts:
        return [
            Rule(hf + "mlp.gate_proj.weight", ours + "mlp.gate_kernel_fd", (ffn, width), count),
            Rule(hf + "mlp.up_proj.weight", ours + "mlp.up_kernel_fd", (ffn, width), count),
            Rule(hf + "mlp.down_proj.weight", ours + "mlp.down_kernel_df", (width, ffn), count),
        ]
    return [
        Rule(hf + "mlp.gate.weight", ours + "mlp.router_kernel_xm", (experts, width), count),
        Rule(hf + GATE_UP, ours + "mlp.gate_up_kernel_xmcf", (experts, width, 2 * ffn), count),
        Rule(hf + DOWN, ours + "mlp.down_kernel_xfm", (experts, ffn, width), count),
    ]


def adapter_rules(config: ModelConfig, rank: int, module: str = TEXT_MODULE) -> dict[str, tuple[Rule, Rule]]:
    """Returns the weight table of adapters, with PEFT's names: each kernel's path -> the rules of its A and B.

    PEFT uses the names of transformers' modules; `module` is the language tower's prefix. Router and experts have no
    adapters, because PEFT adapts linear modules, and these are parameters of larger modules.
    """
    pairs, published = {}, FAMILIES[config.family].text_names
    for rule in _text_rules(config):
        if rank and (kernel := ADAPTED.fullmatch(rule.path)) and "x" not in kernel[2]:
            (written, read), (num_out, num_in) = layout_sides(kernel[2]), rule.hf_shape
            name = rule.hf.removeprefix(published).removesuffix("weight")
            hf, ours = PEFT_PREFIX + module + name, f"{kernel[1]}_lora.kernel_"
            pairs[rule.path] = (
                Rule(f"{hf}lora_A.weight", f"{ours}z{read}", (rank, num_in), rule.count),
                Rule(f"{hf}lora_B.weight", f"{ours}{written}z", (num_out, rank), rule.count),
            )
    return pairs


def hf_tensors(config: ModelConfig, params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Converts parameters by path to the files' tensors, and yields them one at a time."""
    for rule in rules(config):
        for layer, name in enumerate(rule.hf_names):
            yield name, rule.tensor(params, layer)


def open_hf_tensors(directory: Path, config: ModelConfig) -> HfTensors:
    """Opens a model's tensors under their published names and shapes.

    The files may also have the names of transformers' modules, and the shapes of their experts. Of a tied head and
    embedding, they may have only the head, as `safetensors.torch.save_model` writes it.
    """
    tensors, family = HfTensors(directory), FAMILIES[config.family]
    tensors.rename(TEXT_MODULE, family.text_names)
    tensors.rename(VISION_MODULE, family.vision_names)
    if config.tie_embeddings and embedding_name(config) not in tensors.infos:
        tensors.rename(HEAD, embedding_name(config))
    for rule in filter(_is_of_experts, rules(config)):
        for name in rule.hf_names:
            if (info := tensors.infos.get(name)) and info.shape == in_modules(rule.hf_shape):
                tensors.infos[name] = replace(info, shape=rule.hf_shape, swapped=True)
    return tensors


def stored_dtype(hf_dir: Path) -> str:
    """Returns the dtype of all tensors if they share a 16-bit dtype, otherwise float32."""
    with HfTensors(hf_dir) as tensors:
        names = {info.dtype.name for info in tensors.infos.values()}
    return names.pop() if names in ({"bfloat16"}, {"float16"}) else "float32"


def _is_of_experts(rule: Rule) -> bool:
    return rule.hf.endswith((GATE_UP, DOWN))


def in_modules(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of an expert's tensor in transformers' modules and in the files that transformers 5 writes."""
    return (shape[0], *shape[:0:-1])


def is_swapped(rule: Rule) -> bool:
    """Returns whether an export stores the tensor in the axis order of transformers' modules.

    It does so for square tensors, whose shape does not show their order, because transformers 5 then expects its own.
    """
    return _is_of_experts(rule) and in_modules(rule.hf_shape) == rule.hf_shape


def check_hf_tensors(config: ModelConfig, tensors: HfTensors) -> None:
    """Raises an error that lists all tensors that are missing, unknown or of another shape.

    ZeRO-3 and FSDP also store a tied head; it must then equal the embedding.
    """
    expected = {name: rule.hf_shape for rule in rules(config) for name in rule.hf_names}
    shapes, source, embedding = tensors.shapes, tensors.directory, embedding_name(config)
    if config.tie_embeddings and HEAD in shapes:
        if embedding in shapes and not _equal(tensors, HEAD, embedding):
            raise ValueError(
                f"{source}: config.json has tie_word_embeddings=true, but {HEAD} differs from {embedding}; remove the "
                f"wrong one, or set tie_word_embeddings=false"
            )
        del shapes[HEAD]
    problems = [
        *_listing("missing", sorted(expected.keys() - shapes.keys())),
        *_listing("unknown", sorted(shapes.keys() - expected.keys())),
        *_listing(
            "with another shape than in config.json",
            [f"{k} {shapes[k]}, not {expected[k]}" for k in expected if k in shapes and shapes[k] != expected[k]],
        ),
    ]
    if problems:
        raise ValueError(f"{source}: its tensors do not match its config: " + "; ".join(problems))


def _equal(tensors: HfTensors, name: str, other: str) -> bool:
    """Compares two tensors block by block, and returns whether their values are equal."""
    info = tensors.infos[name]
    if info.shape != tensors.infos[other].shape:
        return False
    row_bytes = info.num_bytes // max(1, info.shape[0])
    rows = max(1, READ_BLOCK_BYTES // max(1, row_bytes))
    blocks = (slice(first, first + rows) for first in range(0, info.shape[0], rows))
    return all(np.array_equal(tensors.read(name, block), tensors.read(other, block)) for block in blocks)


def check_param_paths(config: ModelConfig, paths: set[str]) -> None:
    """Raises unless the parameters are exactly the weight table's."""
    table = [rule.path for rule in rules(config)]
    assert len(table) == len(set(table)), "a parameter is named twice in the table"
    problems = [*_listing("missing", sorted(set(table) - paths)), *_listing("unknown", sorted(paths - set(table)))]
    if problems:
        raise ValueError("parameters do not match the weight table: " + "; ".join(problems))


def _listing(problem: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return [f"{len(names)} {problem}: {', '.join(names[:MAX_LISTED])}{more}"]


def read_param(
    tensors: HfTensors, rule: Rule, shape: tuple[int, ...], index: tuple[slice, ...], dtype: Any = None
) -> np.ndarray:
    """Reads `param[index]` of a parameter with the full `shape`; reads only the necessary rows of the files.

    The result has `dtype` (default: the files'). At most READERS tensors at a time are also in memory as in the files.
    """
    index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape, strict=True))
    if rule.count is None:
        return _stacked(lambda name: _read_tensor(tensors, name, shape, index), [rule.hf], dtype)[0]
    return _stacked(lambda name: _read_tensor(tensors, name, shape[1:], index[1:]), rule.hf_names[index[0]], dtype)


def _stacked(read: Callable[[str], np.ndarray], names: Sequence[str], dtype: Any) -> np.ndarray:
    """Reads tensors and stacks them in an array that jax on a CPU can use without a copy.

    Several threads read, because the system takes longer to provide new memory than to copy the values.
    """
    first = read(names[0])
    if len(names) == 1 and dtype in (None, first.dtype):  # avoids a second copy
        return first[None]
    shape = (len(names), *first.shape)
    size = math.prod(shape) * np.dtype(dtype or first.dtype).itemsize
    memory = np.empty(size + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    out = memory[start : start + size].view(dtype or first.dtype).reshape(shape)
    copy_cast(out[0, ...], first, names[0])
    del first

    def place(layer: int) -> None:
        copy_cast(out[layer, ...], read(names[layer]), names[layer])

    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(place, range(1, len(names))):
            pass  # raises a layer's error
    return out


def _read_tensor(tensors: HfTensors, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
    if not shape:
        return tensors.read(name)
    hf_rows = tensors.infos[name].shape[0]
    # Our leading axes may split one HF axis, for example [N, H, D] from [N*H, D]; our row is then several HF rows.
    rows_per_ours = hf_rows // shape[0] if hf_rows % shape[0] == 0 else 1
    whole_rows = all(s == slice(0, n, 1) for s, n in zip(index[1:], shape[1:], strict=True))
    row_bytes = tensors.infos[name].num_bytes // max(shape[0], 1)
    step = shape[0] if whole_rows else max(1, READ_BLOCK_BYTES // row_bytes)
    blocks = []
    for first in range(index[0].start, index[0].stop, step):
        last = min(first + step, index[0].stop)
        block = tensors.read(name, slice(first * rows_per_ours, last * rows_per_ours)).reshape(last - first, *shape[1:])
        blocks.append(block[(slice(None), *index[1:])])
    return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)


def load_hf_params(
    tensors: HfTensors, config: ModelConfig, abstract: dict[str, Any], dtype: Any
) -> dict[str, jax.Array]:
    """Reads the parameters in `abstract`, which has their shardings, from HF files. Devices get only their shards."""
    check_hf_tensors(config, tensors)
    check_param_paths(config, set(abstract))

    def read(rule: Rule, index: tuple[slice, ...] | None) -> np.ndarray:
        shape = abstract[rule.path].shape
        return read_param(tensors, rule, shape, index or (slice(None),) * len(shape), dtype)

    def placed(rule: Rule) -> jax.Array:
        target = abstract[rule.path]
        if target.sharding is None:
            return jax.device_put(read(rule, None))
        return jax.make_array_from_callback(target.shape, target.sharding, partial(read, rule))

    return {rule.path: placed(rule) for rule in rules(config)}


def num_params(config: ModelConfig) -> int:
    return sum(math.prod(rule.hf_shape) * (rule.count or 1) for rule in rules(config))


def in_words(number: int) -> str:
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.2f} million"
