"""What a typical step of a run computes: tokens, rows of the update, and FLOPs by pass.

FLOPs are all that is computed: recomputation, padding, and what blocks of attention do beyond the causal triangle. A
product of [a, b] and [b, c] has 2·a·b·c of them.
"""

import math
from dataclasses import dataclass

from model_port.adapters import adapter_shapes
from model_port.attention.blocked import score_blocks
from model_port.config import ModelConfig
from paravt_jax.config import Config
from paravt_jax.learner.packing import TOKEN_STEP, stepped

# A typical episode. The bounds of a config say little: most turns end long before them.
FRAME_TEXT_TOKENS = 11  # a frame's time, and its start and end
PROMPT_TEXT_TOKENS = 500  # system prompt, tool, question
RESPONSE_TOKENS = 512  # of a main agent: sampled, and reports read
CALLS = 1  # of an episode
REPORT_TOKENS = 256  # of a sub-agent


@dataclass(frozen=True)
class Workload:
    """A typical step."""

    frames: float  # of an overview, the mean
    max_frames: int
    frame_tokens: int  # with its text
    prompt_tokens: int  # the mean
    max_prompt_tokens: int
    response_tokens: int
    num_groups: int
    group_size: int
    calls: int  # of an episode
    call_frames: int
    call_prompt_tokens: int
    report_tokens: int
    row_tokens: int  # of the update's rows, which the largest group decides
    num_rows: int  # that hold tokens
    batch_rows: int

    @property
    def num_episodes(self) -> int:
        return self.num_groups * self.group_size

    @property
    def num_calls(self) -> int:
        return self.num_episodes * self.calls

    @property
    def shared_tokens(self) -> int:
        """A group's prompt once, and its responses."""
        return self.num_groups * (self.prompt_tokens + self.group_size * self.response_tokens)

    @property
    def separate_tokens(self) -> int:
        """What rows of their own would have."""
        return self.num_episodes * (self.prompt_tokens + self.response_tokens)

    @property
    def sampled_tokens(self) -> int:
        return self.num_episodes * self.response_tokens + self.num_calls * self.report_tokens

    @property
    def num_batches(self) -> int:
        return -(-self.num_rows // self.batch_rows)

    @property
    def computed_rows(self) -> int:
        return self.num_batches * self.batch_rows


def workload_of(config: Config, model: ModelConfig) -> Workload:
    train, rollout, video = config.train, config.rollout, config.video
    most = max(video.frame_budgets) if video.gating else video.overview_frames
    frames = sum(video.frame_budgets) / len(video.frame_budgets) if video.gating else float(most)
    frame_tokens = video.max_pixels // (model.vision.patch_px * model.vision.merge) ** 2 + FRAME_TEXT_TOKENS
    room = rollout.max_context_tokens - 1
    response = min(RESPONSE_TOKENS, rollout.max_new_tokens * (rollout.tool_turns + 1), room)
    prompt, max_prompt = (min(round(n * frame_tokens) + PROMPT_TEXT_TOKENS, room) for n in (frames, most))
    calls = min(CALLS, rollout.tool_turns * rollout.calls_per_turn)
    call_prompt = min(rollout.subagent_max_frames * frame_tokens + PROMPT_TEXT_TOKENS, room)
    report = min(REPORT_TOKENS, rollout.subagent_new_tokens)
    row_tokens = min(
        stepped(max_prompt + train.group_size * response, TOKEN_STEP, config.pack.sizes_per_doubling),
        config.pack.row_tokens,
    )
    num_rows = _num_rows(train.prompts_per_step, prompt, train.group_size, response, row_tokens)
    if train.subagent_loss:
        num_calls = train.prompts_per_step * train.group_size * calls
        num_rows += -(-num_calls * (call_prompt + report) // row_tokens)
    return Workload(
        frames=frames,
        max_frames=most,
        frame_tokens=frame_tokens,
        prompt_tokens=prompt,
        max_prompt_tokens=max_prompt,
        response_tokens=response,
        num_groups=train.prompts_per_step,
        group_size=train.group_size,
        calls=calls,
        call_frames=rollout.subagent_max_frames,
        call_prompt_tokens=call_prompt,
        report_tokens=report,
        row_tokens=row_tokens,
        num_rows=num_rows,
        batch_rows=config.pack.num_rows,
    )


def _num_rows(num_groups: int, prompt: int, group_size: int, response: int, row_tokens: int) -> int:
    """A group that is too long for a row is cut, and every piece repeats the prompt."""
    in_a_row = max(1, (row_tokens - prompt) // response)
    if in_a_row < group_size:
        return num_groups * -(-group_size // in_a_row)
    return -(-num_groups // (row_tokens // (prompt + group_size * response)))


def flops_of(config: Config, model: ModelConfig, work: Workload) -> dict[str, float]:
    """Of a step, over all devices."""
    return _rollout_flops(config, model, work) | _update_flops(config, model, work)


def layer_params(model: ModelConfig) -> int:
    """Of all language layers, what every token is multiplied with."""
    text = model.text
    attention = 2 * (text.num_heads + text.num_kv_heads) * text.head_dim * text.width
    return text.num_layers * (attention + 3 * text.width * text.ffn_width)


def adapter_params(config: Config, model: ModelConfig) -> int:
    return sum(math.prod(shape) for shape in adapter_shapes(model, config.lora.rank).values())


def _rollout_flops(config: Config, model: ModelConfig, work: Workload) -> dict[str, float]:
    """The embedded engine reads a dialogue again at every turn, its frames too; servers find it in their caches."""
    embedded = config.engine.kind == "jax"
    again = work.num_calls if embedded else 0
    dialogue = work.prompt_tokens + work.response_tokens
    reads = (
        (work.prompt_tokens, work.num_groups),
        (dialogue, again),
        (work.call_prompt_tokens, work.num_calls),
    )
    num_frames = work.frames * (work.num_groups + again) + work.call_frames * work.num_calls
    context = config.rollout.max_context_tokens if embedded else dialogue  # ours attends to every slot of the cache
    return {
        "rollout, frames": num_frames * _frame_flops(config, model),
        "rollout, reading": sum(
            count * (_product_flops(model, length) + _attention_flops(model, length**2 // 2)) for length, count in reads
        ),
        "rollout, sampling": _product_flops(model, work.sampled_tokens)
        + _head_flops(model, work.sampled_tokens)
        + _attention_flops(model, work.sampled_tokens * context),
    }


def _update_flops(config: Config, model: ModelConfig, work: Workload) -> dict[str, float]:
    remat, by_blocks = config.model.remat, config.model.attention != "xla"
    row = work.row_tokens
    blocks = score_blocks(row, row, True) if by_blocks else [(slice(0, row), row)]
    pairs = sum((block.stop - block.start) * end for block, end in blocks)
    products = _product_flops(model, work.computed_rows * row)
    adapters = 2.0 * adapter_params(config, model) * work.computed_rows * row
    attention = _attention_flops(model, work.computed_rows * pairs)
    head = _head_flops(model, work.num_episodes * work.response_tokens)
    layers = products + adapters + attention
    forward = layers + head
    backward = 2.0 * forward
    if config.lora.rank:  # what is frozen has no gradients of its own
        backward -= products + head
    # The head's logits are always computed again, scores also by the backward pass of the blocks itself. Nothing reads
    # what the last product of a layer made.
    again = head + (attention / 2 if by_blocks else 0.0)
    last = 2.0 * model.text.num_layers * model.text.width * model.text.ffn_width * work.computed_rows * row
    saved = attention if remat == "attention" and by_blocks else 0.0
    again += {"none": 0.0, "dots": attention}.get(remat, layers - last - saved)
    seen = work.num_groups * work.frames * _frame_flops(config, model)
    known = config.train.updates_per_step > 1 or (config.loss.kl_in == "reward" and config.loss.kl_coef > 0)
    passes = {"update, frames": seen * (1 + known)}
    if config.loss.kl_coef:
        passes["update, reference"] = forward + (seen if config.optim.train_vision else 0.0)
    if known:
        passes["update, log-probs before"] = forward
    passes["update, forward and backward"] = forward + backward
    passes["update, computed again"] = again
    if config.optim.train_vision:
        passes["update, frames backward"] = seen * (2 if remat == "none" else 3)
    return passes


def _product_flops(model: ModelConfig, num_tokens: int) -> float:
    return 2.0 * layer_params(model) * num_tokens


def _attention_flops(model: ModelConfig, pairs: int) -> float:
    """Queries with keys, and weights with values, of all layers."""
    return 4.0 * model.text.num_layers * model.text.num_heads * model.text.head_dim * pairs


def _head_flops(model: ModelConfig, num_tokens: int) -> float:
    return 2.0 * model.text.vocab_size * model.text.width * num_tokens


def _frame_flops(config: Config, model: ModelConfig) -> float:
    """Of a frame, at most: every row of patches is computed whole."""
    vision, patches = model.vision, config.video.max_pixels // model.vision.patch_px**2
    block = 4 * vision.width**2 + 2 * vision.width * vision.ffn_width + 2 * patches * vision.width
    merged_width = vision.width * vision.merge_unit
    merger = merged_width * (merged_width + vision.out_width) * (1 + vision.num_deepstack)
    per_patch = vision.num_layers * block + vision.patch_values * vision.width + merger // vision.merge_unit
    return 2.0 * patches * per_patch
