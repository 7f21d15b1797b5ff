"""An evaluation as the card of a model tells it: what it scored, how sure that is, and the certificate behind it.

`paravt_jax.eval` wrote it. Nothing is told that was measured on another model than the one that is exported, and no
score of a public split stands there as a headline that its certificate refused.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model_port.hf_files import HUB_ID

RESULTS_FILE = "eval.json"
DIGEST_CHARS = 12  # of a sum, enough to tell it from another
SCORERS = {"strict": "ours", "official": "the benchmark's"}

Cell = Mapping[str, Any]


def read_cells(run: Path, evaluated: Sequence[str]) -> list[Cell]:
    """The cells of an evaluation, of a model by one of these names."""
    file = run / RESULTS_FILE
    try:
        cells = json.loads(file.read_bytes())["cells"]
    except FileNotFoundError:
        raise ValueError(
            f"{run} has no {RESULTS_FILE}; give the run_dir of an evaluation that came to its end"
        ) from None
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{file} is no evaluation's ({problem}); run paravt_jax.eval again") from None
    known = {str(Path(name).resolve()) for name in evaluated} | {*evaluated}
    for cell in cells:
        path = str(cell["model"]["path"])
        if not known & {path, str(Path(path).resolve())}:
            raise ValueError(f"{run} evaluated {path}, and {evaluated[0]} is exported; give an evaluation of that")
    return cells


def evaluation_lines(cells: Sequence[Cell]) -> Iterator[str]:
    """Markdown, a row for every cell and scorer, then the certificate of every cell."""
    yield "## Evaluation\n"
    yield "| split | calls | frames | scored by | score, % | 95 % interval | missing as wrong | samples |"
    yield "|---|---|---|---|---|---|---|---|"
    for cell in cells:
        yield from (_row(cell, scorer, scores) for scorer, scores in cell["scores"].items())
    if refused := [f"{_split(cell)}: {cell['refused']}" for cell in cells if cell["refused"]]:
        yield f"\nNo headline for {'; '.join(dict.fromkeys(refused))}."
    yield "\nThe interval is of bootstrap draws of whole videos; what is missing is neither wrong nor right.\n"
    yield from dict.fromkeys(map(_certificate, cells))
    yield ""


def _row(cell: Cell, scorer: str, scores: Mapping[str, Any]) -> str:
    count = cell["n"]
    low, high = scores["interval_95"]
    shares = [f"{100 * scores['score']:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"]
    shares.append(f"{100 * scores['missing_as_wrong']:.1f}")
    there = f"{count['answered'] + count['unanswered']} of {count['expected'] or count['rows']}"
    played = [_split(cell), cell["dispatch"], str(cell["frame_budget"]), SCORERS.get(scorer, scorer)]
    return f"| {' | '.join([*played, *shares, there])} |"


def _split(cell: Cell) -> str:
    return cell["split"] or "own data"


def _certificate(cell: Cell) -> str:
    """Without the name of a file: it would be one of this machine."""
    data = cell["data"]
    known = cell["split"] is not None and HUB_ID.fullmatch(str(data["repository"]))
    sums = ", ".join(f"sha256 {text[:DIGEST_CHARS]}" for text in data["sha256"].values())
    source = f"{data['repository']} at {data['revision'] or 'an unknown revision'}" if known else "own data"
    digests = ", ".join(f"{name} {text[:DIGEST_CHARS]}" for name, text in cell["hashes"].items())
    engines = ", ".join(dict.fromkeys(str(engine["kind"]) for engine in cell["engines"])) or "an unknown engine"
    commit = str(cell.get("git_commit") or "an unknown commit")[:DIGEST_CHARS]
    return (
        f"- {_split(cell)}: {source} ({sums}), asked as `{cell['mode']}`, seed {cell['seed']}, "
        f"{cell['num_samples']} a question; {digests}; engine {engines}; paravt_jax at {commit}."
    )
