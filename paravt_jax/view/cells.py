"""Cells of an evaluation: their certificates, or the progress of unfinished cells."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from model_port.json_files import Section, parse_object
from paravt_jax.view.records import samples_of

CELL_NAME = re.compile(r"(.+)_(\d+)(?:_t(\d+(?:\.\d+)?(?:e[+-]?\d+)?))?")
CELL_SECTIONS = ("n", "scores")
PROVENANCE = ("data", "model", "engines", "hashes", "seed", "num_samples", "git_commit", "packages")


def load_cells(run_dir: Path, sampled: Mapping[str, Iterable[Path]]) -> list[dict[str, Any]]:
    """Every cell that has a certificate or samples."""
    certified = {path.stem.removeprefix("cell_"): path for path in sorted(run_dir.glob("cell_*.json"))}
    names = sorted({*certified, *sampled}, key=_order)
    return [
        (_certificate(certified[name]) if name in certified else _progress(sampled[name])) | _named(name)
        for name in names
    ]


def _certificate(path: Path) -> dict[str, Any]:
    try:
        cell = parse_object(path.read_bytes(), path)
        for name in CELL_SECTIONS:
            Section(str(path), cell).section(name)
    except ValueError as problem:
        raise ValueError(f"{problem}; run the evaluation again to rewrite it") from None
    return cell | {"provenance": [[key, json.dumps(cell[key])] for key in PROVENANCE if key in cell]}


def _progress(paths: Iterable[Path]) -> dict[str, Any]:
    """The part of a certificate that is known before the cell is finished."""
    samples = samples_of(paths)
    num_missing = sum(line.missing for line in samples)
    missing = {"so far": num_missing} if num_missing else {}
    return {"n": {"answered": len(samples) - num_missing, "unanswered": 0, "missing": missing}, "scores": {}}


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
