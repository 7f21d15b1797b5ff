"""Renamed and removed settings. A config or a record that sets one gives an error with the new key or the reason."""

RENAMED = {  # old key -> current key, with a hint if its values changed too
    "engine.urls_file": "engine.urls",  # also accepts a file
    "loss.behavior_cap": "loss.correction_bounds: set loss.correction_bounds.max_weight",
    "loss.behavior_correction": "loss.correction: mask is token_mis, truncate is token_tis, none is none",
    "loss.kind": "loss.name",
    "loss.numbers": "loss.params",
    "mismatch.stop_kl": "mismatch.max_kl",
    "rollout.call_deadline_s": "rollout.turn_deadline_s",
    "rollout.min_video_deadline_s": "rollout.turn_deadline_s",
    "video.gating": "video.frame_budgets: [] for false",
    **dict.fromkeys(("loss.kl_in", "loss.kl_estimator"), "loss.kl: k3, k2, reward, returns, see --show"),
    **dict.fromkeys(
        (
            *("reward.think_first_bonus", "reward.answer_suffix", "reward.parts.think"),
            *("reward.parts.answer_opening", "reward.parts.answer_closing"),
        ),
        "reward.format: published, strict, no_suffix, see --show",
    ),
    **dict.fromkeys(
        (
            *("reward.tool_reward", "reward.tool_right", "reward.tool_call_weight"),
            *("reward.tool_right_weight", "reward.call_price"),
        ),
        "reward.tool: published, needed, none, see --show",
    ),
}
FIXED = {  # key -> the value that every run uses
    "advantage.epsilon": 1e-6,
    "checkpoint.grace_s": 120.0,
    "eval.max_in_flight": 32,
    "judge.attempt_deadline_s": 60.0,
    "judge.backoff_s": 1.0,
    "judge.max_attempts": 4,
    "judge.max_backoff_s": 30.0,
    "judge.max_concurrent": 16,
    "judge.max_reply_tokens": 1024,
    "min_pixels": 784,  # key of paravt.json
    "optim.beta1": 0.9,
    "optim.beta2": 0.999,
    "optim.eps": 1e-8,
    "optim.head_chunk_tokens": 256,
    "optim.max_bad_steps": 5,
    "reward.parts.flow": 0.3,
    "reward.parts.think_closing": 0.4,
    "reward.plugin_deadline_s": 60.0,
    "sft.steps_ahead": 2,
    "video.disk_gib": 64.0,
    "video.memory_gib": 2.0,
    "video.min_pixels": 784,
}
REMOVED = {  # key -> reason
    "advantage.max_reward": "advantage.normalise=tokens clips rewards at 2.2, as the release does",
    "advantage.terms": "set advantage.normalise=batch, which gives all terms one std",
    "engine.device": "servers that a run starts use GPUs, or the CPU where no GPU is visible",
    "engine.memory_frac": "start servers with python -m rollout.serve --memory-frac",
    "engine.route": "new weights always reach the servers as files",
    "eval.charades_mode": "eval.mode=agentic is agentic_minimal for Charades-STA, else agentic_general",
    "judge.api_key_env": "the key is in the environment variable JUDGE_API_KEY",
    "log.tensorboard": "every run writes RUN_DIR/tensorboard",
    **dict.fromkeys(
        ("loss.geometric_high", "loss.geometric_low", "loss.geometric_mask"),
        "the geometric mask is gone; set loss.correction",
    ),
    "mismatch.geometric_mask_kl": "the geometric mask is gone; set mismatch.max_kl",
    "mismatch.warn_kl": "a run warns at a tenth of mismatch.max_kl",
    "optim.warmup_frac": "optim.schedule=cosine warms up over 5 % of the steps, constant does not",
    "pack.sizes_per_doubling": "it follows from pack.row_tokens",
    "reward.require_answer_block": "an answer counts only between <answer> and </answer>",
    "reward.tool_right_threshold": "reward.tool=published pays any R_acc above 0, needed its gain",
    "rollout.prompts.clamped": "this text is fixed",
    "rollout.prompts.error": "this text is fixed",
    "rollout.prompts.subagent_frame_times": "a sub-agent's frames have times if rollout.prompts.subagent_intro is not "
    "empty",
    "rollout.token_px": "it is 32 in every Qwen3-VL",
    "rollout.top_p": "runs sample from all tokens; a client of python -m paravt_jax.serve with --url or "
    "--endpoint can send top_p",
    "train.anchor_tokens": "the anchor always includes all three",
    "validation.at_start": "a run with data.validation validates before its first step too",
    "video.decoder": "PyAV always decodes; decord gives wrong frames for some files",
    "video.stratified": "every prompt draws its own frame budget",
    **{key: f"it is always {value}" for key, value in FIXED.items()},
}


def change_of(key: str) -> str:
    """The error for a renamed or removed key; empty for other keys."""
    if key.startswith("loss.numbers."):
        return f"{key} is now loss.params.{key.removeprefix('loss.numbers.')}"
    if key in RENAMED:
        return f"{key} is now {RENAMED[key]}"
    return f"{key} was removed: {REMOVED[key]}" if key in REMOVED else ""
