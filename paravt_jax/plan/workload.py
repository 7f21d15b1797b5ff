"""Estimates the work of a typical step: tokens, rows of the update, and FLOPs by pass.

FLOPs include recomputation, padding, and attention blocks beyond the causal triangle. The product of [a, b] and [b, c]
takes 2·a·b·c FLOPs.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

from model_port.adapters import adapter_shapes
from model_port.attention import Form, computed_pairs, form_of
from model_port.config import LoraConfig, ModelConfig, TextConfig
from model_port.experts import block_shape
from model_port.layers import LIGHTER, Compute, Remat
from paravt_jax.config import MeshConfig, PackConfig, PolicyConfig
from paravt_jax.learner.packing import BatchShape, PromptGroup, best_row_tokens, num_batches, row_lengths
from paravt_jax.learner.settings import LossConfig, OptimConfig

BF16_BYTES = 2
# Recomputation in the backward pass of each attention form, as a fraction of its forward pass: the scores once; the
# kernel has separate programs for keys and queries, so it computes scores and their gradient once more.
SCORES_AGAIN = {"xla": 0.0, "blocked": 0.5, "scanned": 0.5, "kernel": 1.5}


@dataclass(frozen=True)
class PlannedUpdate:
    """The settings that an update's memory, FLOPs and traffic depend on."""

    mesh: MeshConfig
    policy: PolicyConfig
    lora: LoraConfig
    optim: OptimConfig
    loss: LossConfig | None = None  # None: SFT
    temperature: float = 1.0
    scores_before: bool = False  # the policy's log-probs are computed before the update
    host_devices: int = 0  # the learner's devices on each host; 0: unknown, assume one host
    lighter_layers: int = 0  # number of layers that recompute less, chosen for model.remat=auto

    @property
    def num_hosts(self) -> int:
        return -(-self.mesh.num_devices // self.host_devices) if self.host_devices else 1

    @property
    def remat(self) -> Remat:
        """The recomputation; `full` for model.remat=auto until the plan has chosen."""
        return "full" if self.policy.remat == "auto" else self.policy.remat

    def compute(self, attention: Form) -> Compute:
        return Compute(self.policy.dtype, attention, remat=self.remat, lighter_layers=self.lighter_layers)

    def layers_by_remat(self, num_layers: int) -> dict[Remat, int]:
        numbers: dict[Remat, int] = {self.remat: num_layers - self.lighter_layers}
        if self.lighter_layers:
            numbers[LIGHTER[self.remat]] = self.lighter_layers
        return numbers

    @property
    def reads_reference(self) -> bool:
        return self.loss is not None and self.loss.kl_coef > 0

    @property
    def num_scores(self) -> int:
        """The number of forward passes before the gradients: for the reference and for old log-probs."""
        return self.reads_reference + self.scores_before

    @property
    def num_encoded(self) -> int:
        """How often the vision tower encodes a batch's frames; a trained tower's pass for gradients is not counted."""
        return self.num_scores if self.optim.train_vision else 1 + self.scores_before


@dataclass(frozen=True)
class Workload:
    """The workload of a typical step."""

    frames: float  # mean per overview
    prompt_tokens: int  # mean
    response_tokens: int
    num_groups: int
    group_size: int
    calls: float | int  # per episode
    call_frames: int
    call_prompt_tokens: int  # prompt of a sub-agent
    report_tokens: int
    shown_tokens: int  # tokens of the frames that a call returns to the main agent
    trains_subagents: bool
    row_tokens: int  # row length of the update, as chosen by the learner
    num_batches: int

    @property
    def num_episodes(self) -> int:
        return self.num_groups * self.group_size

    @property
    def num_calls(self) -> float:
        return self.num_episodes * self.calls

    @property
    def shared_tokens(self) -> int:
        """Tokens of the update, with each group's prompt counted once."""
        main_tokens = self.num_groups * (self.prompt_tokens + self.group_size * self.response_tokens)
        return main_tokens + self.subagent_tokens

    @property
    def subagent_tokens(self) -> int:
        return round(self.num_calls * (self.call_prompt_tokens + self.report_tokens)) * self.trains_subagents

    @property
    def own_tokens(self) -> float:
        """Tokens that a main agent samples; it only reads the reports and frames."""
        return max(0, self.response_tokens - self.calls * (self.report_tokens + self.shown_tokens))

    @property
    def num_call_frames(self) -> float:
        """The number of frames of all calls, if the update encodes them."""
        return self.num_calls * self.call_frames if self.shown_tokens or self.trains_subagents else 0

    @property
    def sampled_tokens(self) -> float:
        return self.num_episodes * self.own_tokens + self.num_calls * self.report_tokens

    @property
    def longest_tokens(self) -> float:
        """Tokens sampled sequentially in an episode: a turn's calls run concurrently."""
        return self.own_tokens + (self.report_tokens if self.calls else 0)

    def with_calls(self, calls: float, length: float = 1.0) -> "Workload":
        """The same episodes with another number of calls and reports, and `length` times as many sampled tokens."""
        report_tokens = round(length * self.report_tokens)
        response_tokens = round(length * self.own_tokens + calls * (report_tokens + self.shown_tokens))
        return replace(self, calls=calls, report_tokens=report_tokens, response_tokens=response_tokens)


@cache  # a plan calls it for every recomputation and mesh
def packed_rows(groups: tuple[PromptGroup, ...], pack: PackConfig, num_updates: int, num_hosts: int) -> tuple[int, int]:
    """The row length and the number of batches that the learner packs these groups into.

    Each host packs its groups of each update separately, and the host with the most batches decides the number.
    """
    lengths = [pack.row_tokens] if pack.one_shape else row_lengths(pack.row_tokens)
    host_rows = max(1, pack.num_rows // num_hosts)
    of_updates = [groups[first::num_updates] for first in range(num_updates)]
    of_hosts = [{each[first::num_hosts] for first in range(num_hosts)} for each in of_updates]
    needed = [sum(max(num_batches(own, length, host_rows) for own in each) for each in of_hosts) for length in lengths]
    row_tokens = best_row_tokens(lengths, needed)
    return row_tokens, int(needed[lengths.index(row_tokens)])


@dataclass(frozen=True)
class Step:
    """A step's work: equal batches, and the number of tokens."""

    shape: BatchShape
    num_batches: int
    num_updates: int
    num_tokens: int  # excludes padding

    def num_runs(self, program: str) -> int:
        """The optimizer runs once per update, other programs once per batch."""
        return self.num_updates if program == "apply_gradients" else self.num_batches


def full_step(shape: BatchShape) -> Step:
    """A step of one batch without padding."""
    return Step(shape, 1, 1, shape.num_rows * shape.row_tokens)


def layer_params(model: ModelConfig) -> int:
    """Parameters of the language layers' matrix products."""
    return _layer_params(model.text, max(1, model.text.num_experts))


def active_params(model: ModelConfig) -> int:
    """Parameters that compute a token; with experts, only the router and the token's experts."""
    return _layer_params(model.text, max(1, model.text.token_experts))


def _layer_params(text: TextConfig, num_mlps: int) -> int:
    attention = 2 * (text.num_heads + text.num_kv_heads) * text.head_dim
    return text.num_layers * text.width * (attention + text.num_experts + 3 * num_mlps * text.ffn_width)


def expert_rows(text: TextConfig, num_tokens: int) -> int:
    """The rows that a device's experts compute in each layer, including padding of their blocks."""
    return math.prod(block_shape(num_tokens, text.num_experts, text.token_experts)) if text.num_experts else 0


def decoded_bytes(model: ModelConfig, item_bytes: int = BF16_BYTES) -> int:
    """Bytes of the weights that a decode step reads."""
    return item_bytes * (layer_params(model) + model.text.vocab_size * model.text.width)


def cached_bytes(model: ModelConfig, item_bytes: int = BF16_BYTES) -> int:
    """Bytes of a token's keys and values."""
    return 2 * item_bytes * model.text.num_layers * model.text.num_kv_heads * model.text.head_dim


def adapter_params(rank: int, model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in adapter_shapes(model, rank).values())


def batch_flops(update: PlannedUpdate, model: ModelConfig, shape: BatchShape, platform: str) -> dict[str, float]:
    """FLOPs of an update with a single batch, over all devices, by pass. Includes recomputation and padding."""
    policy, rank, trained = update.policy, update.lora.rank, update.optim.train_vision
    form = form_of(policy.attention, shape.row_tokens, platform)
    tokens, actions = shape.num_rows * shape.row_tokens, shape.num_rows * shape.row_actions
    experts, padding = _expert_flops(update.mesh, model, shape)
    products, adapters = _product_flops(model, tokens) + padding, 2.0 * adapter_params(rank, model) * tokens
    attention = _attention_flops(model, shape.num_rows * row_pairs(policy.attention, model, shape.row_tokens, platform))
    head = _head_flops(model, actions)
    layers = products + adapters + attention
    forward = layers + head
    backward = 2.0 * forward
    if rank:  # frozen weights have no gradients
        backward -= products + head
    # The head's logits are always recomputed. A dense layer's last product is never recomputed.
    again = head + SCORES_AGAIN[form] * attention
    last = 0.0 if experts else 2.0 * model.text.num_layers * model.text.width * model.text.ffn_width * tokens
    scores = attention if form == "xla" else 0.0  # this form saves scores only if everything is saved
    by_remat = {"none": 0.0, "dots": scores + experts, "attention": layers - attention - last + scores}
    for remat, number in update.layers_by_remat(model.text.num_layers).items():
        again += number / model.text.num_layers * by_remat.get(remat, layers - last)
    vision = shape.num_frame_rows * frame_flops(model, shape.row_patches)
    passes = {
        "update, vision": vision * update.num_encoded,
        "update, reference": forward * update.reads_reference,
        "update, old log-probs": forward * update.scores_before,
        "update, forward and backward": forward + backward,
        "update, recomputation": again,
        "update, trained vision": vision * trained * (3 if update.remat == "none" else 4),
    }
    return {name: flops for name, flops in passes.items() if flops}


def needed_flops(update: PlannedUpdate, model: ModelConfig, step: Step) -> float:
    """FLOPs of a step that the mathematics requires: no recomputation, no padding, causal scores only."""
    shape, times = step.shape, step.num_batches
    causal = times * shape.num_rows * shape.row_tokens * (shape.row_tokens + 1) // 2
    weights = _product_flops(model, step.num_tokens) + _head_flops(model, times * shape.num_rows * shape.row_actions)
    adapters = 2.0 * adapter_params(update.lora.rank, model) * step.num_tokens
    forward = weights + adapters + _attention_flops(model, causal)
    attended = model.vision.attended(shape.row_patches)
    vision = times * shape.num_frame_rows * frame_flops(model, shape.row_patches, attended)
    frozen = weights if update.lora.rank else 0.0  # frozen weights have no gradients
    return (3 + update.num_scores) * forward - frozen + (3 if update.optim.train_vision else 1) * vision


def row_pairs(attention: Form, model: ModelConfig, row_tokens: int, platform: str) -> int:
    """The number of token pairs with computed scores, for a full causal row and a single head."""
    queries_per_key = model.text.num_heads // model.text.num_kv_heads
    return computed_pairs(attention, row_tokens, queries_per_key, platform)


def token_flops(model: ModelConfig, context: float, num_together: int = 0) -> float:
    """FLOPs per prefill token, which attends to half of the context on average.

    `num_together` is the chunk size of the embedded sampler, whose experts pad their blocks.
    """
    text = model.text
    padding = expert_rows(text, num_together) / num_together - text.token_experts if num_together else 0
    return _product_flops(model, 1) + _row_flops(text) * padding + _attention_flops(model, context // 2)


def _product_flops(model: ModelConfig, num_tokens: float) -> float:
    return 2.0 * active_params(model) * num_tokens


def _expert_flops(mesh: MeshConfig, model: ModelConfig, shape: BatchShape) -> tuple[float, float]:
    """FLOPs of all experts, and the part of these FLOPs that is padding."""
    text, tokens, parts = model.text, shape.num_rows * shape.row_tokens, mesh.num_row_parts
    rows = parts * expert_rows(text, tokens // parts)
    return _row_flops(text) * rows, _row_flops(text) * (rows - tokens * text.token_experts)


def _row_flops(text: TextConfig) -> float:
    """FLOPs of one row in one expert, summed over all layers."""
    return 6.0 * text.num_layers * text.width * text.ffn_width


def _attention_flops(model: ModelConfig, pairs: float) -> float:
    """FLOPs of both attention products in all layers."""
    return 4.0 * model.text.num_layers * model.text.num_heads * model.text.head_dim * pairs


def _head_flops(model: ModelConfig, num_tokens: float) -> float:
    return 2.0 * model.text.vocab_size * model.text.width * num_tokens


def frame_flops(model: ModelConfig, patches: int, attended: float | int | None = None) -> float:
    """Upper bound of FLOPs per frame, including padding and scores of other windows.

    `attended` is the number of patches that a patch attends to; None: all.
    """
    vision, attended = model.vision, patches if attended is None else attended
    block = 4 * vision.width**2 + vision.ffn_kernels * vision.width * vision.ffn_width + 2 * attended * vision.width
    merged_width = vision.width * vision.merge_unit
    merger = merged_width * (merged_width + vision.out_width) * (1 + vision.num_deepstack)
    per_patch = vision.num_layers * block + vision.patch_values * vision.width + merger // vision.merge_unit
    return 2.0 * patches * per_patch
