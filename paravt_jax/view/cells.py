"""Cells of an evaluation: the results in their certificates, or the progress of unfinished cells."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paravt_jax.view.records import samples_of

CELL_NAME = re.compile(r"(.+)_(\d+)(?:_t([\d.e+-]+))?")
SHARES = ("score", "micro", "missing_as_wrong")  # columns of a scorer besides its interval and groups
PROVENANCE = ("data", "model", "engines", "hashes", "seed", "num_samples", "git_commit", "packages")


def load_cells(run_dir: Path, sampled: Mapping[str, Iterable[Path]]) -> list[dict[str, Any]]:
    """Every cell that has a certificate or samples."""
    certified = {path.stem.removeprefix("cell_"): path for path in sorted(run_dir.glob("cell_*.json"))}
    names = sorted({*certified, *sampled}, key=_order)
    return [
        _certified(name, certified[name]) if name in certified else _unfinished(name, sampled[name]) for name in names
    ]


def _certified(name: str, path: Path) -> dict[str, Any]:
    try:
        cell = json.loads(path.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{path} is not valid JSON ({problem}); run the evaluation again to rewrite it") from None
    counts, metrics = cell["n"], cell["metrics"]
    return {
        "name": name,
        **_named(name),
        "split": cell["split"],
        "mode": cell.get("mode"),
        "num_there": counts["answered"] + counts["unanswered"],
        "num_unanswered": counts["unanswered"],
        "num_expected": counts["expected"] or counts["rows"],
        "missing": counts["missing"],
        "refused": cell["refused"],
        "scores": {scorer: _score(scores) for scorer, scores in cell["scores"].items()},
        "f_tau": metrics.get("format_reward"),
        "parseable": metrics.get("parseable_frac"),
        "kappa": metrics.get("tool_calls_mean"),
        "frames": cell["frames"],
        "crop_frames": cell["crop_frames"],
        "provenance": [[key, json.dumps(cell[key])] for key in PROVENANCE if key in cell],
    }


def _score(scores: Mapping[str, Any]) -> dict[str, Any]:
    variants = {name: value for name, value in scores.items() if "@" in name}
    return {
        **{name: scores[name] for name in SHARES},
        "interval": scores["interval_95"],
        "variants": variants,
        "groups": scores["groups"],
    }


def _unfinished(name: str, paths: Iterable[Path]) -> dict[str, Any]:
    samples = samples_of(paths)
    num_missing = sum(line.missing for line in samples)
    missing = {"so far": num_missing} if num_missing else {}
    return {"name": name, **_named(name), "num_there": len(samples) - num_missing, "missing": missing, "scores": {}}


def _named(name: str) -> dict[str, Any]:
    """Splits a cell name of the form DISPATCH_FRAMES or DISPATCH_FRAMES_tTEMPERATURE."""
    match = CELL_NAME.fullmatch(name)
    dispatch, frames, temperature = match.groups() if match else (name, None, None)
    return {
        "dispatch": dispatch,
        "frame_budget": frames and int(frames),
        "temperature": temperature and float(temperature),
    }


def _order(name: str) -> tuple[str, int, float]:
    named = _named(name)
    return named["dispatch"], named["frame_budget"] or 0, named["temperature"] or 0.0
