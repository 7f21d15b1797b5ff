"""Estimates an update's seconds by roofline: matrix products, memory traffic and collectives, without overlap.

Elementwise traffic does not overlap with products. Memory traffic is counted, not measured:

- weights, per pass: read as masters, then written and read in the activations' dtype
- activations, per pass: written once and read once; the backward pass reads them, and writes and reads gradients
- scores, in the attention forms that XLA computes: SCORE_BYTES per pair of tokens and head, after XLA's fusions
- float32 logits of the scored tokens; gradient accumulation; 32 bytes per parameter in the optimizer

The sharding implies the collectives: over fsdp, an all-gather of the weights per pass, a reduce-scatter of their
gradients, and an exchange of embedding rows; over tensor, two all-reduces of activations per layer and pass; over data,
an all-reduce of the gradients.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from model_port.attention import form_of
from model_port.config import ModelConfig
from paravt_jax.learner.head import block_size
from paravt_jax.learner.packing import BatchShape
from paravt_jax.plan.collectives import Collective, among
from paravt_jax.plan.devices import DEVICES_OF_A_HOST, Rates
from paravt_jax.plan.memory import FLOAT32_BYTES, Share, adapter_values_on, share_of, vision_residuals
from paravt_jax.plan.workload import PlannedUpdate, Step, batch_flops, row_pairs

SCORES_IN_MEMORY = ("xla", "blocked", "scanned")
# From XLA's GPU programs of the scanned form. Forward: scores are written once and read three times in float32, weights
# written and read in bfloat16. Backward: two arrays are written and read in float32, three in bfloat16.
SCORE_BYTES = {"forward": 20, "backward": 28}
LOGIT_PASSES = 3  # written, read for the sum, read for the target; as often in the backward pass
GRADIENT_BYTES = 16  # written, and added to the step's gradients
OPTIMIZER_BYTES = 32  # gradients read twice for the norm; parameters and two moments read and written

PROGRAM_OF = {
    "update, vision": "encode_vision",
    "update, reference": "score",
    "update, old log-probs": "score",
    "update, forward and backward": "gradients",
    "update, recomputation": "gradients",
    "update, trained vision": "gradients",
}


class ProgramWork(NamedTuple):
    """A device's work in a compiled or planned program."""

    flops: float
    memory_bytes: float
    collectives: tuple[Collective, ...]

    @property
    def sent_bytes(self) -> int:
        return sum(each.num_bytes for each in self.collectives)

    def seconds(self, rates: Rates) -> "StepSeconds":
        return StepSeconds(
            self.flops / rates.flops,
            self.memory_bytes / rates.memory_bytes,
            sum(each.seconds(rates) for each in self.collectives),
        )


class StepSeconds(NamedTuple):
    products: float
    memory: float
    collectives: float

    @property
    def total(self) -> float:
        return sum(self)


def step_seconds(works: Mapping[str, ProgramWork], step: Step, rates: Rates) -> StepSeconds:
    each = [[step.num_runs(name) * part for part in work.seconds(rates)] for name, work in works.items()]
    return StepSeconds(*(sum(parts) for parts in zip(*each, strict=True)))


def batch_works(update: PlannedUpdate, model: ModelConfig, shape: BatchShape, platform: str) -> dict[str, ProgramWork]:
    """The work of an update with a single batch, by program of the learner."""
    share = share_of(update, model, shape, platform)
    flops = dict.fromkeys(PROGRAM_OF.values(), 0.0)
    for name, value in batch_flops(update, model, shape, platform).items():
        flops[PROGRAM_OF[name]] += value / update.mesh.num_devices
    encoded, sent = [_over_fsdp("all-gather", share, share.vision_values)], list(_score_collectives(share))
    works = {
        "encode_vision": (update.num_encoded, vision_bytes(share), encoded),
        "score": (update.num_scores, forward_bytes(share), sent),
        "gradients": (1, update_bytes(share), list(_update_collectives(share))),
        "apply_gradients": (1, OPTIMIZER_BYTES * share.num_trainable, []),
    }
    return {
        name: ProgramWork(flops.get(name, 0.0), times * memory_bytes, tuple(times * collectives))
        for name, (times, memory_bytes, collectives) in works.items()
        if times
    }


def forward_bytes(share: Share) -> float:
    return _layers_bytes(share) + _head_bytes(share)


def update_bytes(share: Share) -> float:
    """Traffic of the forward pass, recomputation and the backward pass."""
    again = _repeated_frac(share) * _layers_bytes(share)
    backward = _layers_bytes(share, "backward") + 2 * _head_bytes(share) + GRADIENT_BYTES * share.num_trainable
    trained = 3.5 * vision_bytes(share) if share.update.optim.train_vision else 0.0  # (2 + 2 again + 3 back) / 2
    return forward_bytes(share) + again + backward + trained


def _repeated_frac(share: Share) -> float:
    """The fraction of layers whose forward pass is repeated at least in part."""
    layers = share.model.text.num_layers
    return 1 - share.update.layers_by_remat(layers).get("none", 0) / layers


def vision_bytes(share: Share) -> float:
    shape, vision = share.batch, share.model.vision
    residuals = vision_residuals(share.model, replace(share.compute, remat="none"), share.update.mesh.tensor)
    patches = share.rows_here(shape.num_frame_rows) * shape.row_patches
    pairs = patches * shape.row_patches * vision.num_heads * vision.num_layers // share.update.mesh.tensor
    weights = (share.num_params - share.num_text) * share.stored_bytes + 2 * share.vision_values * share.item_bytes
    return weights + 2 * vision.num_layers * residuals.layer_token * patches + SCORE_BYTES["forward"] * pairs


def _layers_bytes(share: Share, way: str = "forward") -> float:
    shape, text, layers = share.batch, share.local.text, share.model.text.num_layers
    values = layers * share.layer_values
    weights = values // share.update.mesh.fsdp * share.stored_bytes + 2 * values * share.item_bytes
    token_bytes = share.text_residuals(replace(share.compute, remat="none")).layer_token
    saved = token_bytes * share.rows * shape.row_tokens + share.expert_bytes
    activations = {"forward": 2, "backward": 3}[way] * layers * saved
    attention = share.update.policy.attention
    pairs = row_pairs(attention, share.model, shape.row_tokens, share.platform)
    in_memory = form_of(attention, shape.row_tokens, share.platform) in SCORES_IN_MEMORY
    scores = SCORE_BYTES[way] * pairs * layers * text.num_heads * share.rows * in_memory
    return weights + activations + scores


def _head_bytes(share: Share) -> float:
    vocab_size, actions = share.local.text.vocab_size, share.rows * share.batch.row_actions
    num_blocks = -(-vocab_size // block_size(vocab_size, share.batch.row_actions))
    hidden = num_blocks * actions * share.model.text.width * share.item_bytes
    return float(LOGIT_PASSES * actions * vocab_size * FLOAT32_BYTES + hidden + share.table_values * share.item_bytes)


def _score_collectives(share: Share) -> Iterator[Collective]:
    layers = share.model.text.num_layers
    yield _over_fsdp("all-gather", share, layers * share.layer_values + share.table_values)
    yield _over_fsdp("all-to-all", share, _token_values(share))
    yield _over_tensor(share, 2 * layers + 1)


def _update_collectives(share: Share) -> Iterator[Collective]:
    layers, mesh = share.model.text.num_layers, share.update.mesh
    values = layers * share.layer_values
    if share.update.optim.train_vision:
        values += share.vision_values
    yield _over_fsdp("all-gather", share, 2 * (values + share.table_values))
    # The head's gradient is float32. With adapters, no other weights have gradients.
    gradients = values + FLOAT32_BYTES // share.item_bytes * share.table_values
    if share.adapted:
        gradients = adapter_values_on(replace(mesh, fsdp=1), share.model, share.update.lora.rank)
    yield _over_fsdp("reduce-scatter", share, gradients)
    yield _over_fsdp("all-to-all", share, (1 if share.adapted else 2) * _token_values(share))
    yield _over_tensor(share, round(2 * layers * (2 + _repeated_frac(share))) + 2)
    yield _among(share, "all-reduce", share.num_trainable, mesh.data, mesh.fsdp * mesh.tensor)


def _over_fsdp(kind: str, share: Share, num_values: int) -> Collective:
    return _among(share, kind, num_values, share.update.mesh.fsdp, share.update.mesh.tensor)


def _over_tensor(share: Share, times: int) -> Collective:
    return _among(share, "all-reduce", times * _token_values(share), share.update.mesh.tensor, 1)


def _among(share: Share, kind: str, num_values: int, num_devices: int, stride: int) -> Collective:
    host_devices = share.update.host_devices or DEVICES_OF_A_HOST
    return among(kind, num_values * share.item_bytes, num_devices, stride, host_devices)


def _token_values(share: Share) -> int:
    """The number of values in a layer's input."""
    return share.rows * share.batch.row_tokens * share.model.text.width
