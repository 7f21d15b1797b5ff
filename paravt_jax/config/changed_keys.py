"""Renamed and removed settings. A config that sets one gives an error with the new key or the reason.

The record of an earlier run (RUN/config.json, paravt.json) contains every setting, including defaults. There a renamed
key is read as the new one, and a removed key is ignored if its value is the one that is now fixed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

Record = dict[str, Any]

RENAMED = {
    "engine.urls_file": "engine.urls",  # accepts a file too
    "loss.behavior_cap": "loss.correction_bounds",
    "loss.behavior_correction": "loss.correction",
    "loss.kind": "loss.name",
    "loss.numbers": "loss.params",
    "mismatch.stop_kl": "mismatch.max_kl",
    "rollout.call_deadline_s": "rollout.turn_deadline_s",
    "rollout.min_video_deadline_s": "rollout.turn_deadline_s",
    "video.gating": "video.frame_budgets",
}
CORRECTIONS = {"mask": "token_mis", "truncate": "token_tis", "none": "none"}  # values of loss.behavior_correction
HINTS = {
    "loss.behavior_cap": "set loss.correction_bounds.max_weight",
    "loss.behavior_correction": ", ".join(f"{old} is {new}" for old, new in CORRECTIONS.items()),
    "video.gating": "[] for false",
}
# Settings that replace several of their section: the names of these, and the choice for their values; defaults first.
MERGED: dict[str, tuple[tuple[str, ...], dict[tuple[Any, ...], str]]] = {
    "loss.kl": (
        ("kl_in", "kl_estimator"),
        {("loss", "k3"): "k3", ("loss", "k2"): "k2", ("reward", "k1"): "reward", ("returns", "k1"): "returns"},
    ),
    "reward.format": (
        ("think_first_bonus", "answer_suffix"),
        {(True, True): "published", (False, True): "strict", (True, False): "no_suffix"},
    ),
    "reward.tool": (
        ("tool_reward", "tool_right", "tool_call_weight", "tool_right_weight", "call_price"),
        {
            (True, "any", 0.3, 0.5, 0.0): "published",
            (True, "needed", 0.0, 1.0, 0.03): "needed",
            (False, "any", 0.3, 0.5, 0.0): "none",
        },
    ),
}
MERGED_INTO = {f"{key.partition('.')[0]}.{name}": key for key, (names, _) in MERGED.items() for name in names}


class Removed(NamedTuple):
    fixed: Any  # the value that every run uses now, or that a function takes from the section's other settings
    reason: str

    def fixed_in(self, section: Record) -> Any:
        return self.fixed(section) if callable(self.fixed) else self.fixed


def _default(value: Any) -> Removed:
    return Removed(value, f"it is always {value}")


REMOVED = {
    "advantage.epsilon": _default(1e-6),
    "advantage.max_reward": Removed(
        lambda advantage: 2.2 if advantage.get("normalise") == "tokens" else 0.0,
        "advantage.normalise=tokens clips rewards at 2.2, as the release does",
    ),
    "advantage.terms": Removed("together", "set advantage.normalise=batch, which gives all terms one std"),
    "checkpoint.grace_s": _default(120.0),
    "engine.device": Removed("cuda", "servers that a run starts use GPUs, or the CPU where no GPU is visible"),
    "engine.memory_frac": Removed(0.8, "start servers with python -m rollout.serve --memory-frac"),
    "engine.route": Removed("disk", "new weights always reach the servers as files"),
    "eval.charades_mode": Removed("", "eval.mode=agentic is agentic_minimal for Charades-STA, else agentic_general"),
    "eval.max_in_flight": _default(32),
    "judge.api_key_env": Removed("", "the key is in the environment variable JUDGE_API_KEY"),
    "judge.attempt_deadline_s": _default(60.0),
    "judge.backoff_s": _default(1.0),
    "judge.max_attempts": _default(4),
    "judge.max_backoff_s": _default(20.0),
    "judge.max_concurrent": _default(16),
    "judge.max_reply_tokens": _default(1024),
    "log.tensorboard": Removed(True, "every run writes RUN_DIR/tensorboard"),
    "loss.geometric_high": Removed(1.1, "the geometric mask is gone; set loss.correction"),
    "loss.geometric_low": Removed(0.9, "the geometric mask is gone; set loss.correction"),
    "loss.geometric_mask": Removed(False, "the geometric mask is gone; set loss.correction"),
    "mismatch.geometric_mask_kl": Removed(0.03, "the geometric mask is gone; set mismatch.max_kl"),
    "mismatch.warn_kl": Removed(0.01, "a run warns at a tenth of mismatch.max_kl"),
    "min_pixels": _default(784),  # of paravt.json
    "optim.beta1": _default(0.9),
    "optim.beta2": _default(0.999),
    "optim.eps": _default(1e-8),
    "optim.head_chunk_tokens": _default(256),
    "optim.max_bad_steps": _default(5),
    "optim.warmup_frac": Removed(
        lambda optim: 0.05 if optim.get("schedule") == "cosine" else 0.0,
        "optim.schedule=cosine warms up over 5 % of the steps, constant does not",
    ),
    "pack.sizes_per_doubling": Removed(4, "it follows from pack.row_tokens"),
    "reward.parts.answer_closing": _default(0.2),
    "reward.parts.answer_opening": _default(0.3),
    "reward.parts.flow": _default(0.3),
    "reward.parts.think": _default(0.2),
    "reward.parts.think_closing": _default(0.4),
    "reward.plugin_deadline_s": _default(60.0),
    "reward.require_answer_block": Removed(True, "an answer counts only between <answer> and </answer>"),
    "reward.tool_right_threshold": _default(0.5),
    "rollout.prompts.clamped": Removed(
        "The video ends at {end_s:.1f} seconds, so the part from {start_s:.1f} to {end_s:.1f} was looked at.",
        "this text is fixed",
    ),
    "rollout.prompts.error": Removed("Error: {message}.", "this text is fixed"),
    "rollout.prompts.subagent_frame_times": Removed(
        lambda prompts: bool(prompts.get("subagent_intro", True)),
        "a sub-agent's frames have times if rollout.prompts.subagent_intro is not empty",
    ),
    "rollout.token_px": Removed(32, "it is 32 in every Qwen3-VL"),
    "rollout.top_p": Removed(1.0, "runs sample from all tokens; a client of python -m paravt_jax.serve can send top_p"),
    "sft.steps_ahead": _default(2),
    "train.anchor_tokens": Removed(["closings", "openings", "turn_end"], "the anchor always includes all three"),
    "video.decoder": Removed("pyav", "PyAV always decodes; decord gives wrong frames for some files"),
    "video.disk_gib": _default(64.0),
    "video.memory_gib": _default(2.0),
    "validation.at_start": Removed(True, "a run with data.validation validates before its first step too"),
    "video.min_pixels": _default(784),
    "video.stratified": Removed(False, "every prompt draws its own frame budget"),
}
IGNORED_IN_RECORDS = {  # ignored at any value: they change neither the method nor the results of a resumed run
    "checkpoint.grace_s",
    "engine.device",
    "engine.memory_frac",
    "engine.route",
    "log.tensorboard",
    "mismatch.geometric_mask_kl",
    "mismatch.warn_kl",
    "pack.sizes_per_doubling",
    "rollout.call_deadline_s",
    "rollout.min_video_deadline_s",
    "validation.at_start",
    "video.decoder",
    "video.disk_gib",
    "video.memory_gib",
}


def change_of(key: str) -> str:
    """The error for a renamed or removed key; empty for other keys."""
    if key.startswith("loss.numbers."):
        return f"{key} is now loss.params.{key.removeprefix('loss.numbers.')}"
    if key in RENAMED:
        return f"{key} is now {RENAMED[key]}" + (f": {HINTS[key]}" if key in HINTS else "")
    if key in MERGED_INTO:
        return f"{key} is now {MERGED_INTO[key]}: {', '.join(MERGED[MERGED_INTO[key]][1].values())}, see --show"
    return f"{key} was removed: {REMOVED[key].reason}" if key in REMOVED else ""


# Today's settings for a setting of an earlier record and its section. What has no equal keeps its key, for the error.
CONVERTED: dict[str, Callable[[Any, Record], Record]] = {
    "engine.urls_file": lambda file, engine: {"urls": [file]} if file else {},
    "loss.behavior_cap": lambda cap, loss: (
        {"correction_bounds": {"max_weight": cap} if loss.get("behavior_correction") != "none" else {}}
    ),
    "loss.behavior_correction": lambda correction, loss: {"correction": CORRECTIONS[correction]},
    "video.frame_budgets": lambda budgets, video: {"frame_budgets": budgets if video.get("gating", True) else []},
    "video.gating": lambda gating, video: {},
}


def updated_record(record: Record, section: str = "") -> Record:
    """An earlier run's settings under today's keys. A removed key with another value stays and causes an error."""
    updated: Record = {}
    for name, value in _merged(record, section).items():
        key = f"{section}{name}"
        is_fixed = key in REMOVED and value == REMOVED[key].fixed_in(record)
        if key in IGNORED_IN_RECORDS or is_fixed or (key == "judge" and value is None):
            continue
        if key in CONVERTED:
            updated |= CONVERTED[key](value, record)
            continue
        if isinstance(value, dict) and value:
            value = updated_record(value, f"{key}.")
            if not value:
                continue
        updated[RENAMED.get(key, key).rpartition(".")[2]] = value
    return updated


def _merged(record: Record, section: str) -> Record:
    """Replaces settings that are one today. If their values have no equal, they stay."""
    for key, (names, options) in MERGED.items():
        values = tuple(record.get(name, default) for name, default in zip(names, next(iter(options)), strict=True))
        choice = next((choice for old, choice in options.items() if old == values), None)
        if f"{key.partition('.')[0]}." == section and record.keys() & set(names) and choice:
            kept = {name: value for name, value in record.items() if name not in names}
            record = kept | {key.partition(".")[2]: choice}
    return record
