"""Estimates one device's memory during training, part by part, before anything is loaded.

Parameters are counted with the sharding table. Autodiff residuals come from the model's backward pass, traced on shapes
with a single device's heads, ffn and vocabulary. The rest models the peak of XLA's buffer assignment for updates on
CPU, GPU and TPU: attention score blocks, gradients in flight, weights gathered over fsdp, a block of the head's logits.
Scoring needs only a forward pass, so it never sets the peak.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model_port.adapters import adapter_shapes, add_adapter
from model_port.attention import Form, form_of, scanned
from model_port.config import NO_ADAPTERS, LoraConfig, ModelConfig, TextConfig
from model_port.experts import block_shape
from model_port.inputs import TextBatch, empty_vision
from model_port.layers import Compute
from model_port.loading import abstract_model, abstract_params
from model_port.sampler.frames import TABLE_TOKENS
from model_port.sampler.pages import PAGE_TOKENS
from model_port.sampler.sampler import chunk_tokens
from model_port.sharding import check_divisible, param_spec, sampling_tensor
from model_port.text import LONG_ROW_TOKENS, Visual
from paravt_jax.config import MeshConfig
from paravt_jax.learner.head import block_size
from paravt_jax.learner.packing import BatchShape
from paravt_jax.plan.workload import PlannedUpdate, row_pairs

FLOAT32_BYTES = 4
MOMENTS = 2  # Adam's moments per parameter
LOGITS_AT_ONCE = 2  # arrays per block in the head's backward pass: XLA for GPUs holds 1.0 to 1.5, for CPUs up to 3
SCANNED_ARRAYS = 3  # arrays per pair of blocks: scores, weights and their gradient
BLOCKED_ARRAYS = {"tpu": 1}  # elsewhere 2, because only XLA for TPU fuses one array away
COPY = "copy for sampling"
ENGINE_PARTS = ("key/value cache", "encoded frames", COPY)
JOINED = {"q_lora": 3, "k_lora": 3, "v_lora": 3, "gate_lora": 2, "up_lora": 2}  # projections of the same input
PROBE_LAYERS = 5  # layers of the traced model: more than its DeepStack maps
PROBE_MERGED = 131  # tokens and merged patches of the traced model: a prime that equals no model width


Parts = dict[str, int]  # bytes by name


@dataclass(frozen=True)
class SamplerShape:
    max_rows: int  # per host
    cache_tokens: int  # per host
    local: MeshConfig  # the learner's mesh within a host
    beside_update: bool  # the sampler runs during updates


@dataclass(frozen=True)
class Memory:
    """The planned memory of one device, in bytes."""

    resident: Parts
    phases: dict[str, Parts]  # memory of each phase of a step, in addition to the resident memory
    engine: Parts  # memory of an engine on the same device during updates

    @property
    def phase_bytes(self) -> dict[str, int]:
        return {name: sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def peak_bytes(self) -> int:
        return sum(self.resident.values()) + max(self.phase_bytes.values())


@dataclass(frozen=True)
class Residuals:
    """Bytes saved for the backward pass, per token and per pair of tokens in a row, in a layer and outside."""

    layer_token: float
    layer_pair: float
    token: float
    pair: float
    layer_casts: float  # the layer's weights, cast to the activations' dtype

    def layer_bytes(self, rows: int, row_tokens: int) -> int:
        return round(rows * row_tokens * (self.layer_token + self.layer_pair * row_tokens))

    def other_bytes(self, rows: int, row_tokens: int) -> int:
        """Bytes saved outside the layers."""
        return round(rows * row_tokens * (self.token + self.pair * row_tokens))


def memory_of(
    update: PlannedUpdate, model: ModelConfig, batch: BatchShape, sampler: SamplerShape | None, platform: str
) -> Memory:
    device = share_of(update, model, batch, platform)
    beside = device.sampling(sampler) if sampler is not None and sampler.beside_update else {}
    accumulators = {"gradients of the step": FLOAT32_BYTES * device.num_trainable}
    learning = accumulators | device.batch_arrays()
    phases = {
        "backward pass, a layer": learning | device.backward() | device.layer() | beside,
        "backward pass, the head": learning | device.backward() | device.head() | beside,
        "frames": learning | device.vision() | beside,
        "optimizer": accumulators | beside | (device.moments if update.optim.offload else {}),
    }
    if sampler is not None:
        phases["rollout"] = device.sampling(sampler) | device.copy(sampler, temporary=True)
        if sampler.beside_update:
            phases["publish"] = {"next copy for sampling": device.copied_bytes(sampler)}
    resident = device.resident(sampler)
    engine = {name: size for name, size in resident.items() if name in ENGINE_PARTS} | beside
    return Memory(resident, phases, engine)


@cache
def param_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    return {path: leaf.shape for path, leaf in abstract_params(abstract_model(model), "float32").items()}


def shard_values(shapes: dict[str, tuple[int, ...]], mesh: MeshConfig) -> int:
    """The number of parameter values on a device."""
    sizes = {"data": mesh.data, "fsdp": mesh.fsdp, "tensor": mesh.tensor}
    total = 0
    for path, shape in shapes.items():
        spec = param_spec(path, len(shape))
        check_divisible(path, shape, spec, sizes)
        total += math.prod(shape) // math.prod(sizes[str(axis)] for axis in spec if axis is not None)
    return total


@cache
def values_on(mesh: MeshConfig, model: ModelConfig, prefix: str = "") -> int:
    """The number of values on a device of the parameters under a path prefix."""
    return shard_values({path: shape for path, shape in param_shapes(model).items() if path.startswith(prefix)}, mesh)


@cache
def adapter_values_on(mesh: MeshConfig, model: ModelConfig, rank: int) -> int:
    return shard_values(adapter_shapes(model, rank), mesh)


@cache
def sampled_adapter_values(model: ModelConfig, rank: int, tensor: int, platform: str) -> int:
    """The number of values of adapters in the sampling copy on a device. On GPUs, B is block-diagonal (see Joined)."""
    shapes = adapter_shapes(model, rank)
    for path, shape in shapes.items():
        if platform == "gpu" and path.endswith("z"):
            shapes[path] = (*shape[:-1], shape[-1] * JOINED.get(path.split(".")[-2], 1))
    return shard_values(shapes, MeshConfig(1, 1, tensor))


@cache
def sampling_tensor_on(local: MeshConfig, model: ModelConfig) -> int:
    """The number of a host's devices over which the sampler splits heads."""
    return sampling_tensor(param_shapes(model), asdict(local))


def share_of(update: PlannedUpdate, model: ModelConfig, batch: BatchShape, platform: str) -> "Share":
    return Share(update, model, batch, _local(model, update.mesh.tensor), platform)


@dataclass(frozen=True)
class Share:
    """A device's share of a run: its resident memory, and the memory that a batch adds in each phase."""

    update: PlannedUpdate
    model: ModelConfig
    batch: BatchShape
    local: ModelConfig  # the language tower's shard on this device
    platform: str

    @property
    def item_bytes(self) -> int:
        return jnp.dtype(self.update.policy.dtype).itemsize

    @property
    def compute(self) -> Compute:
        """The compute to trace. All attention forms except xla save the same arrays for the backward pass."""
        form: Form = "xla" if self.update.policy.attention == "xla" else "blocked"
        return replace(self.update.compute(form), lighter_layers=0)

    @property
    def num_params(self) -> int:
        return values_on(self.update.mesh, self.model)

    @property
    def adapted(self) -> bool:
        """Whether only adapters train."""
        return self.update.lora.rank > 0

    @property
    def num_text(self) -> int:
        return values_on(self.update.mesh, self.model, "text.")

    @property
    def num_trainable(self) -> int:
        if self.adapted:
            return adapter_values_on(self.update.mesh, self.model, self.update.lora.rank)
        return self.num_params if self.update.optim.train_vision else self.num_text

    @property
    def vision_values(self) -> int:
        """Values of the vision tower during computation, gathered over fsdp."""
        return values_on(replace(self.update.mesh, fsdp=1), self.model, "vision.")

    @property
    def table_values(self) -> int:
        """Values of the head during computation, gathered over fsdp."""
        return self.local.text.vocab_size * self.model.text.width

    @property
    def layer_values(self) -> int:
        stacked = {path: shape for path, shape in param_shapes(self.local).items() if path.startswith("text.layers.")}
        return sum(map(math.prod, stacked.values())) // self.model.text.num_layers

    @property
    def stored_bytes(self) -> int:
        """Bytes per stored weight: a float32 master, or a frozen weight under adapters."""
        return self.item_bytes if self.adapted else FLOAT32_BYTES

    @property
    def rows(self) -> int:
        return self.rows_here(self.batch.num_rows)

    def rows_here(self, num_rows: int) -> int:
        """The number of rows on this device. Rows that do not divide are replicated (model_port.sharding.constrain)."""
        parts = self.update.mesh.num_row_parts
        return num_rows // parts if num_rows % parts == 0 else num_rows

    def text_residuals(self, compute: Compute) -> Residuals:
        """The language tower's residuals without the experts', which do not grow with every token."""
        is_split, model = self.batch.row_tokens > LONG_ROW_TOKENS, self.local
        if model.text.num_experts:
            model = replace(model, text=replace(model.text, num_experts=0, token_experts=0, ffn_width=1))
        return text_residuals(model, compute, self.update.lora, self.update.mesh.tensor if is_split else 1)

    @property
    def expert_bytes(self) -> int:
        """Bytes that a layer's experts save for the backward pass: rows of blocks, and weights copied per block."""
        text, tokens = self.local.text, self.rows * self.batch.row_tokens
        if not text.num_experts:
            return 0
        num_blocks, rows = block_shape(tokens, text.num_experts, text.token_experts)
        kernels = 3 * text.width * text.ffn_width * (num_blocks if num_blocks > text.num_experts else 0)
        values = num_blocks * rows * (2 * text.width + 3 * text.ffn_width) + kernels
        return values * self.item_bytes

    def resident(self, sampler: SamplerShape | None) -> Parts:
        parts = {"masters, float32": FLOAT32_BYTES * self.num_trainable}
        if self.adapted:
            parts["frozen weights"] = self.item_bytes * self.num_params
        elif self.num_params > self.num_trainable:
            parts["frozen vision tower, float32"] = FLOAT32_BYTES * (self.num_params - self.num_trainable)
        offload = self.update.optim.offload
        if not offload:
            parts |= self.moments
        if self.update.reads_reference and not offload:
            parts["reference"] = self.item_bytes * self.num_trainable
        if sampler is not None:
            text = self.model.text
            pages = -(-sampler.cache_tokens // PAGE_TOKENS) + sampler.max_rows + 1
            tensor = sampling_tensor_on(sampler.local, self.model)
            kv_values = 2 * text.num_layers * text.num_kv_heads * text.head_dim // tensor
            parts["key/value cache"] = pages * PAGE_TOKENS * kv_values * self.item_bytes
            maps = 1 + self.model.vision.num_deepstack
            parts["encoded frames"] = TABLE_TOKENS * maps * text.width * self.item_bytes
            parts |= self.copy(sampler, temporary=False)
        return {name: num_bytes for name, num_bytes in parts.items() if num_bytes}

    def copied_bytes(self, sampler: SamplerShape) -> int:
        """Bytes of the weights to sample from, except weights shared with the learner."""
        tensor = sampling_tensor_on(sampler.local, self.model)
        adapters = sampled_adapter_values(self.model, self.update.lora.rank, tensor, self.platform)
        if not self.samples_in_place(sampler):
            return self.item_bytes * (values_on(MeshConfig(1, 1, tensor), self.model) + adapters)
        if not self.adapted and (sampler.beside_update or self.item_bytes < FLOAT32_BYTES):
            return self.item_bytes * self.num_params
        layers = self.model.text.num_layers * self.layer_values if self.platform == "gpu" else 0
        return self.item_bytes * (layers + adapters)

    def copy(self, sampler: SamplerShape, *, temporary: bool) -> Parts:
        """The sampling copy's bytes if `temporary` matches: deleted before updates, or kept (see LocalCopy)."""
        is_temporary = self.samples_in_place(sampler) and not sampler.beside_update
        return {COPY: self.copied_bytes(sampler)} if temporary == is_temporary else {}

    def samples_in_place(self, sampler: SamplerShape) -> bool:
        """Whether the sampler shards weights like the learner, on one host over the same devices (see LocalCopy)."""
        local, tensor = sampler.local, sampling_tensor_on(sampler.local, self.model)
        return self.update.mesh == local == MeshConfig(local.num_devices // tensor, 1, tensor)

    @property
    def moments(self) -> Parts:
        return {"Adam moments, float32": MOMENTS * FLOAT32_BYTES * self.num_trainable}

    def batch_arrays(self) -> Parts:
        """Bytes of the update's inputs: ids, positions, patches, and the frozen tower's output."""
        vision, batch = self.model.vision, self.batch
        token_bytes, action_bytes = 4 * 7, 4 * 8 + 1
        smallest = empty_vision(vision, 1, vision.merge_unit)
        patch_bytes = sum(array.nbytes for array in jax.tree.leaves(smallest)) // vision.merge_unit
        patches = self.rows_here(batch.num_frame_rows) * batch.row_patches
        num_bytes = self.rows * (batch.row_tokens * token_bytes + batch.row_actions * action_bytes)
        table = patches // vision.merge_unit * self.model.text.width * self.item_bytes
        return {
            "batch": num_bytes + patches * patch_bytes,
            "visual table and maps": table * (1 + vision.num_deepstack),
        }

    def backward(self) -> Parts:
        """Memory held during the whole backward pass."""
        saved, casts, num_layers = 0, 0.0, self.model.text.num_layers
        for remat, layers in self.update.layers_by_remat(num_layers).items():
            residuals = self.text_residuals(replace(self.compute, remat=remat))
            if remat == "offload":
                residuals = replace(residuals, layer_token=0.0)  # layer inputs are in host memory
            saved += layers * residuals.layer_bytes(self.rows, self.batch.row_tokens)
            saved += layers * self.expert_bytes * (remat == "none")
            casts += layers * residuals.layer_casts
        parts = {
            "gradients of the batch": FLOAT32_BYTES * self.num_trainable,
            "saved by the forward pass": saved,
        }
        if casts:
            parts["casts of the layers' weights"] = round(casts) // self.update.mesh.fsdp
        if self.update.lighter_layers:  # the stacked weights are copied, because the layers run in two scans
            copied = self.stored_bytes * num_layers * self.layer_values // self.update.mesh.fsdp
            parts["the layers' weights, in two parts"] = copied
        if self.update.optim.train_vision:
            residuals = vision_residuals(self.model, self.compute, self.update.mesh.tensor)
            batch = self.rows_here(self.batch.num_frame_rows), self.batch.row_patches
            layers_bytes = self.model.vision.num_layers * residuals.layer_bytes(*batch)
            parts["saved by the vision tower"] = layers_bytes + residuals.other_bytes(*batch)
        return parts

    def layer(self) -> Parts:
        """Memory of a layer's backward pass: all arrays of its forward pass, and gradients of the widest products."""
        text, residuals = self.local.text, self.text_residuals(replace(self.compute, remat="none"))
        ffn_width = 0 if text.num_experts else text.ffn_width
        in_flight = (3 * ffn_width + 2 * text.width) * self.item_bytes
        residuals = replace(residuals, layer_token=residuals.layer_token + in_flight)
        return {
            "activations of a layer": residuals.layer_bytes(self.rows, self.batch.row_tokens),
            **({"experts of a layer": 2 * self.expert_bytes} if text.num_experts else {}),
            "attention scores": self.score_bytes(self.rows, self.batch.row_tokens),
            "a layer's weights, gathered": self.layer_values * self.item_bytes,
        }

    def score_bytes(self, rows: int, row_tokens: int) -> int:
        """Bytes of a layer's scores. Compilers keep all blocks at once, because they are independent."""
        heads = rows * self.local.text.num_heads * FLOAT32_BYTES
        form = form_of(self.update.policy.attention, row_tokens, self.platform)
        if form == "xla":
            return heads * row_tokens**2  # only the gradient, because residuals of the layer include saved scores
        text = self.local.text
        query_bytes = heads * row_tokens * text.head_dim
        if form == "kernel":
            return query_bytes  # queries and gradient in the kernel's layout; scores stay on chip
        if form == "scanned":
            pair = scanned.block_tokens(row_tokens, text.num_heads // text.num_kv_heads) ** 2
            return heads * SCANNED_ARRAYS * pair + query_bytes  # every key block adds to the gradient
        pairs = row_pairs(self.update.policy.attention, self.model, row_tokens, self.platform)
        return heads * BLOCKED_ARRAYS.get(self.platform, 2) * pairs

    def head(self) -> Parts:
        actions, width = self.rows * self.batch.row_actions, self.model.text.width
        size = block_size(self.local.text.vocab_size, self.batch.row_actions)
        hidden = (self.rows * self.batch.row_tokens + actions) * width
        residuals = self.text_residuals(self.compute)
        head_bytes = self.item_bytes + (0 if self.adapted else FLOAT32_BYTES)
        return {
            "saved by the final norm": residuals.other_bytes(self.rows, self.batch.row_tokens),
            "a block of the head and its gradient": size * width * head_bytes,
            "logits of a block": LOGITS_AT_ONCE * actions * size * FLOAT32_BYTES,
            "hidden states and gradient": 2 * hidden * self.item_bytes + actions * width * FLOAT32_BYTES,
        }

    def vision(self) -> Parts:
        """Memory of the frozen vision tower: a block at its widest, and the output maps."""
        vision, patches = self.model.vision, self.rows_here(self.batch.num_frame_rows) * self.batch.row_patches
        values = vision.patch_values + (4 + vision.num_deepstack) * vision.width + vision.ffn_kernels * vision.ffn_width
        scores = self.batch.row_patches * vision.num_heads * FLOAT32_BYTES
        return {"vision tower": patches * (values * self.item_bytes + scores)}

    def sampling(self, sampler: SamplerShape) -> Parts:
        """Memory to prefill a chunk and to sample a token for all rows. XLA may also copy a layer's weights."""
        text, tensor = self.model.text, sampling_tensor_on(sampler.local, self.model)
        mlps = max(1, text.num_experts)  # every expert computes a small number of tokens
        token = (3 * mlps * text.ffn_width + 2 * text.num_heads * text.head_dim) // tensor + (3 + mlps) * text.width
        layer = values_on(MeshConfig(1, 1, tensor), self.model, "text.layers.") // text.num_layers
        num_chunk = chunk_tokens(self.platform)
        scores = num_chunk**2 * text.num_heads // tensor * FLOAT32_BYTES
        return {
            "prefill of a chunk": num_chunk * token * self.item_bytes + scores,
            "sampling a token": LOGITS_AT_ONCE * sampler.max_rows * text.vocab_size // tensor * FLOAT32_BYTES,
            "a layer's weights for sampling": layer * self.item_bytes,
        }


def _local(model: ModelConfig, tensor: int) -> ModelConfig:
    names = ("num_heads", "num_kv_heads", "ffn_width", "vocab_size")
    sizes = {name: getattr(model.text, name) for name in names}
    for name, size in sizes.items():
        if size % tensor:
            raise ValueError(f"mesh.tensor={tensor} does not divide the model's {name}={size}; choose one that does")
    text: TextConfig = replace(model.text, **{name: size // tensor for name, size in sizes.items()})
    return replace(model, text=text)


@cache
def text_residuals(model: ModelConfig, compute: Compute, lora: LoraConfig, tensor: int) -> Residuals:
    """Traces the language tower's residuals. `model` is a device's share; arrays of full width are split too."""
    model = replace(model, text=replace(model.text, num_layers=PROBE_LAYERS))
    ids = _shape(1, PROBE_MERGED)
    text = TextBatch(ids, _shape(1, PROBE_MERGED, 3), ids, ids, ids)
    table = (1, 7, model.text.width)
    visual = Visual(
        _shape(*table, dtype=compute.dtype), _shape(model.vision.num_deepstack, *table, dtype=compute.dtype)
    )

    def parts(shape: tuple[int, ...]) -> int:
        return tensor if shape[-1:] == (model.text.width,) else 1

    return _residuals(model, compute, PROBE_MERGED, lambda policy: policy.hidden, text, visual, lora=lora, parts=parts)


@cache
def vision_residuals(model: ModelConfig, compute: Compute, tensor: int) -> Residuals:
    vision, row = model.vision, (1, PROBE_MERGED * model.vision.merge_unit)
    model = replace(model, vision=vision.with_layers(PROBE_LAYERS))
    frames = jax.tree.map(lambda array: _shape(*array.shape, dtype=array.dtype), empty_vision(vision, *row))

    def parts(shape: tuple[int, ...]) -> int:
        """Divides arrays by `tensor` instead of tracing fewer heads, because the config ties width to head count."""
        split = shape[-1:] == (vision.ffn_width,) or shape[-2:] == (vision.num_heads, vision.head_dim)
        return tensor if split else 1

    return _residuals(model, compute, row[1], lambda policy: policy.encode_vision, frames, parts=parts)


def _shape(*shape: int, dtype: str = "int32") -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _residuals(
    model: ModelConfig,
    compute: Compute,
    num_tokens: int,
    forward: Callable[..., Any],
    *inputs: Any,
    parts: Callable[[tuple[int, ...]], int] = lambda shape: 1,
    lora: LoraConfig = NO_ADAPTERS,
) -> Residuals:
    """Traces a backward pass and sums its residuals by layer, token and pair of tokens."""
    policy = abstract_model(model, compute)
    add_adapter(policy, lora, {p: _shape(*s, dtype="float32") for p, s in adapter_shapes(model, lora.rank).items()})
    graphdef, params, frozen = nnx.split(policy, nnx.LoRAParam if lora.rank else nnx.Param, ...)

    def backward(params: nnx.State, frozen: nnx.State, *inputs: Any) -> Any:
        return jax.vjp(lambda params: forward(nnx.merge(graphdef, params, frozen))(*inputs), params)[1]

    sums: dict[tuple[bool, int], float] = {}
    for leaf in jax.tree.leaves(jax.eval_shape(backward, params, frozen, *inputs)):
        in_layers = leaf.shape[:1] == (PROBE_LAYERS,)
        token_axes = sum(axis in (num_tokens, PROBE_MERGED) for axis in leaf.shape)
        if not token_axes and (lora.rank or leaf.dtype == jnp.float32):
            continue  # master and frozen parameters are resident
        key, num_bytes = (in_layers, token_axes), leaf.size * leaf.dtype.itemsize / parts(leaf.shape)
        share = num_bytes / num_tokens**token_axes / (PROBE_LAYERS if in_layers else 1)
        sums[key] = sums.get(key, 0.0) + share
    return Residuals(
        layer_token=sums.get((True, 1), 0.0),
        layer_pair=sums.get((True, 2), 0.0),
        token=sums.get((False, 1), 0.0),
        pair=sums.get((False, 2), 0.0),
        layer_casts=sums.get((True, 0), 0.0),
    )
