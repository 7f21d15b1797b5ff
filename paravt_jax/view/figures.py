"""Metrics of a run for the page: the settings, first and last values, and charts over steps.

`paravt_jax.run.charts` defines the charts. They only use metrics that the run has logged, so runs of other kinds show
their own metrics.
"""

import itertools
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from model_port.terminal import visible
from paravt_jax.run.charts import OTHER, SECTIONS, Chart, LoggedRun, flat_config, validation_key

HEADLINE_FRAC = 0.1  # fraction of steps to average at each end
HEADLINES = {  # key -> symbol, name, color
    "rollout/format_reward": ("f_τ", "format reward", "red"),
    "rollout/parseable_frac": ("parseable", "episodes", "pink"),
    "rollout/tool_calls_mean": ("κ", "calls per episode", "orange"),
    "rollout/accuracy_mean": ("R_acc", "accuracy", "blue"),
    "rollout/reward_mean": ("R", "reward", "ink"),
    "loss/imitation": ("L", "imitation loss, nats per token", "neutral"),
}
MAX_POINTS = 600  # per line; with more steps, points are means
MAX_OTHER = 80  # charts of metrics without a predefined chart, for example from plugins
KINDS = {"eval": "evaluation", "sft": "imitation"}  # config section -> the kind of run that has it
FACTS = {  # label -> config keys, with values joined by a multiplication sign
    "Model": ("model.path",),
    "Activations": ("model.dtype",),
    "Engine": ("engine.kind",),
    "Split": ("data.split",),
    "Prompt mode": ("eval.mode",),
    "Dispatches": ("eval.dispatches",),
    "Frames": ("eval.frame_budgets",),
    "Temperatures": ("eval.temperatures",),
    "Samples per prompt": ("eval.num_samples",),
    "Rows per step": ("sft.rows_per_step",),
    "Tokens per row": ("pack.row_tokens",),
    "Episodes per step": ("train.prompts_per_step", "train.group_size"),
    "Dispatch": ("rollout.dispatch",),
    "Frame budgets K": ("video.frame_budgets",),
    "Anchor credit": ("advantage.credit",),
    "Learning rate": ("optim.learning_rate",),
    "Loss": ("loss.name",),
    "KL coefficient": ("loss.kl_coef",),
    "Maximum staleness": ("train.max_staleness",),
    "Mesh: data, fsdp, tensor": ("mesh.data", "mesh.fsdp", "mesh.tensor"),
    "Seed": ("seed",),
}
IDLE = {"evaluation": {"rollout.dispatch", "video.frame_budgets"}, "imitation": {"rollout.dispatch"}}  # unused keys
ENDPOINT_FACTS = FACTS | {"Model": ("engine.model",), "Activations": (), "Mesh: data, fsdp, tensor": ()}


def kind_of(config: Mapping[str, Any]) -> str:
    """The kind of run, by the config section that only this kind has."""
    return next((kind for section, kind in KINDS.items() if section in config), "training")


def about(run: LoggedRun) -> dict[str, Any]:
    """The head of the page: name, steps done and planned, commit, versions, settings."""
    config = run.settings.get("config", {})
    planned = [
        value
        for key, value in flat_config(run.settings).items()
        if key.endswith(".num_steps") and isinstance(value, int)
    ]
    return {
        "kind": kind_of(config),
        "name": run.name,
        "steps_done": max(run.metrics.rows, default=0),
        "steps_planned": planned[0] if planned else None,
        "changes": _changes(run),
        **describe(run.settings),
    }


def _changes(run: LoggedRun) -> list[tuple[int, list[list[str]]]]:
    """Settings that changed after the first step, with the number of steps done before and both values."""
    changes = []
    for version, following in itertools.pairwise(run.settings_log):
        old, new = flat_config(version), flat_config(following)
        keys = [key for key in new | old if new.get(key) != old.get(key)]
        if keys and following["after_step"]:
            texts = [[key, f"{_value(old, key)} → {_value(new, key)}"] for key in keys]
            changes.append((following["after_step"], texts))
    return changes


def describe(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describes a run's settings, commit and package versions."""
    config = flat_config(settings)
    idle = IDLE.get(kind_of(settings.get("config", {})), set())
    facts = ENDPOINT_FACTS if config.get("engine.kind") == "openai" and config.get("engine.urls") else FACTS
    return {
        "commit": settings.get("git_commit"),
        "packages": {name: str(version) for name, version in (settings.get("packages") or {}).items()},
        "facts": [
            [label, text] for label, keys in facts.items() if idle.isdisjoint(keys) and (text := _fact(config, keys))
        ],
        "settings": [[key, _text(value)] for key, value in config.items()],
    }


def headlines(run: LoggedRun) -> list[dict[str, Any]]:
    """First and last values of the headline metrics; losses if the run has no episodes."""
    named = {key: names for key, names in HEADLINES.items() if run.metrics.has(key)}
    losses = [key for key in run.metrics.keys if key.startswith("loss/")][: len(HEADLINES)]
    named = named or {key: (key.removeprefix("loss/"), key, "neutral") for key in losses}
    return [_headline(run, key, *names) for key, names in named.items()]


def _headline(run: LoggedRun, key: str, symbol: str, name: str, color: str) -> dict[str, Any]:
    values = run.metrics.column(key)
    size = max(1, round(HEADLINE_FRAC * len(values)))
    validation = run.validation.column(validation_key(key))
    validation = validation[np.isfinite(validation)]
    return {
        "key": visible(key),
        "symbol": visible(symbol),
        "name": visible(name),
        "color": color,
        "first": _number(_mean(values[:size])),
        "last": _number(_mean(values[-size:])),
        "num_steps": size,
        "validation": _numbers(validation[sorted({0, len(validation) - 1})]) if len(validation) else None,
        "line": _numbers(_means(values, _bins(len(values), max_bins=80))),
    }


def charts(run: LoggedRun) -> dict[str, Any]:
    bins = _bins(len(run.metrics.steps))
    unnamed = [chart for chart in run.charts if chart.section == OTHER]
    return {
        "steps": [int(run.metrics.steps[part[-1]]) for part in bins],
        "steps_per_point": max(map(len, bins), default=1),
        "validation_steps": run.validation.steps.tolist(),
        "charts": [_chart(run, chart, bins) for chart in run.charts if chart not in unnamed[MAX_OTHER:]],
        "num_left_out": len(unnamed[MAX_OTHER:]),
    }


def _chart(run: LoggedRun, chart: Chart, bins: list[np.ndarray]) -> dict[str, Any]:
    validation = run.validation_values(chart)
    return {
        "title": visible(chart.title),
        "section": SECTIONS.get(chart.section),
        "kind": chart.kind,
        "from_zero": chart.from_zero,
        "sparse": chart.sparse,
        "whole": run.is_whole(chart),
        "levels": list(run.kl_levels.items()) if chart.kind == "log" else [],
        "validation": None if validation is None else _numbers(validation),
        "lines": [
            {"label": visible(line.label), "color": line.color, "repeat": chart.repeat_of(line)}
            | {"values": _numbers(_means(run.values(chart, line), bins))}
            for line in chart.lines
        ],
    }


def _bins(length: int, max_bins: int = MAX_POINTS) -> list[np.ndarray]:
    """Bins of equal size, except the last. Means over unequal bins would alias with periodic metrics."""
    size = max(1, -(-length // max_bins))
    return np.split(np.arange(length), range(size, length, size)) if length else []


def _means(values: Float[np.ndarray, " n"], bins: list[np.ndarray]) -> Float[np.ndarray, " m"]:
    return np.array([_mean(values[part]) for part in bins])


def _mean(values: np.ndarray) -> float:
    """Mean of the finite values; NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else float("nan")


def _numbers(values: np.ndarray) -> list[float | None]:
    return [_number(value) for value in values]


def _number(value: float) -> float | None:
    """Rounds a value to keep the page small; None for NaN, which JSON lacks."""
    return float(f"{value:.5g}") if np.isfinite(value) else None


def _fact(config: Mapping[str, Any], keys: tuple[str, ...]) -> str:
    return " × ".join(_text(config[key]) for key in keys) if all(key in config for key in keys) else ""


def _value(config: Mapping[str, Any], key: str) -> str:
    return (_text(config[key]) or "empty") if key in config else "–"


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    return visible(value) if isinstance(value, str) else json.dumps(value)
