"""Writes the report page: one file with markup, style, scripts, and the data as JSON.

The data are escaped so that no text in them can close their script element, and the scripts show them with textContent
only. The content security policy allows this style and these scripts by hash, and pictures embedded in the page, but no
network. Episodes are in a separate element, one per line; the page parses an episode when you open it.
"""

import base64
import hashlib
import html
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from model_port.terminal import visible
from paravt_jax import view
from paravt_jax.run.charts import LoggedRun, load_run
from paravt_jax.run.directory import load_settings
from paravt_jax.run.log import METRICS_FILE
from paravt_jax.view.cells import load_cells
from paravt_jax.view.episodes import PageDict, convert_within, row_of, share_bytes
from paravt_jax.view.figures import about, charts, describe, headlines, kind_of
from paravt_jax.view.pictures import Album, make_album
from paravt_jax.view.records import SHARDS, Chosen, cells_of, chosen_of_cells, chosen_of_steps, steps_of

WEIGHTED = ("accuracy", "format", "anchor")  # terms of the reward with a weight in the settings
SCRIPTS = ("dom", "charts", "head", "film", "reader", "list", "page")  # concatenated into one script, in this order


def make_page(run_dirs: Sequence[Path], max_episodes: int, *, frames: bool = False) -> bytes:
    """Builds the page for one run or several, finished or not. `frames` adds pictures from the videos."""
    runs = [_load_run(run_dir) for run_dir in run_dirs]
    chosen = _choose(runs, max_episodes)
    num_bytes = share_bytes(sum(len(lines_of_run.lines) for lines_of_run in chosen))
    entries_of_runs = [
        list(lines_of_run.convert(partial(_entry, number, run, num_bytes)))
        for number, (run, lines_of_run) in enumerate(zip(runs, chosen, strict=True))
    ]
    records = [
        {
            "about": about(run),
            "headlines": headlines(run),
            "figures": charts(run),
            "cells": load_cells(run.path, cells_of(run.path)),
            "num_episodes": len(entries),
            "num_parts_shown": lines_of_run.num_parts_shown,
            "num_parts": lines_of_run.num_parts,
            "max_episodes": max_episodes,
        }
        for run, lines_of_run, entries in zip(runs, chosen, entries_of_runs, strict=True)
    ]
    rows = [row for row, _ in itertools.chain(*entries_of_runs)]
    episodes = [episode for _, episode in itertools.chain(*entries_of_runs)]
    title = ", ".join(run.name for run in runs)
    return render(title, records, rows, episodes, make_album(episodes) if frames else None)


def question_page(
    settings: Mapping[str, Any], record: Mapping[str, Any], answer: Mapping[str, Any], pictures: Mapping[str, str]
) -> bytes:
    """Builds the page for a question with its episode and answer. `pictures` maps strip keys to base64 images."""
    episode = convert_within(share_bytes(1), record, _forced(settings))
    album = Album.of(pictures, [episode])
    head = {
        "kind": "question",
        "name": episode["question"],
        "steps_done": 0,
        "steps_planned": None,
        **describe(settings),
    }
    run = {"about": head, "figures": None, "cells": [], "answer": answer}
    return render(episode["question"], [run], [row_of(episode, 0)], [episode], album)


def render(
    title: str, runs: Sequence[Any], rows: Sequence[PageDict], episodes: Sequence[PageDict], album: Album | None
) -> bytes:
    """Fills the page template. `rows` is the episode list; without an `album` the page has no pictures."""
    data = {
        "runs": runs,
        "rows": rows,
        "pictures": None if album is None else album.to_record(),
        "made_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    source = files(view)
    style = source.joinpath("page.css").read_text("utf-8")
    parts = [source.joinpath(f"{name}.js").read_text("utf-8") for name in SCRIPTS]
    script = "\n".join(['"use strict";', "(() => {", *parts, "})();"])
    markup = source.joinpath("page.html").read_text("utf-8")
    page = Template(markup).substitute(  # in one pass, so that placeholders inside the data are not replaced
        title=html.escape(visible(title)),
        policy=html.escape(_policy(style, script, pictured=album is not None)),
        style=style,
        script=script,
        data=embedded(data),
        episodes="\n".join(map(embedded, episodes)),
    )
    return page.encode()


def embedded(data: Any) -> str:
    """JSON for a script element: ASCII without `<`, `>` and `&`, so that it contains no markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _load_run(run_dir: Path) -> LoggedRun:
    run = load_run(run_dir)
    if not run.settings:  # as before the shards of an evaluation are merged
        of_shards = map(load_settings, sorted(run_dir.glob(SHARDS)))
        run = replace(run, settings=next(filter(None, of_shards), {}))
    if not run.settings and not run.metrics.rows and not steps_of(run_dir) and not cells_of(run_dir):
        raise ValueError(
            f"{run_dir} is not a run: it has no {METRICS_FILE}, no episodes or samples and no config.json of a run; "
            f"give the run_dir of a run"
        )
    return run


def _choose(runs: Sequence[LoggedRun], max_episodes: int) -> list[Chosen]:
    """Chooses an equal share of episodes per run, or 1 episode of as many runs as possible.

    Training runs with episodes use their common steps, if any.
    """
    shares = [max_episodes // len(runs) or int(number < max_episodes) for number in range(len(runs))]
    steps = [steps_of(run.path) for run in runs]
    with_episodes = [set(steps_of_run) for steps_of_run in steps if steps_of_run] or [set()]
    common = set.intersection(*with_episodes) or set().union(*with_episodes)
    return [
        chosen_of_steps([path for step, path in steps_of_run.items() if step in common], share)
        if steps_of_run
        else chosen_of_cells(cells_of(run.path), share, _num_samples(run))
        for run, steps_of_run, share in zip(runs, steps, shares, strict=True)
    ]


def _num_samples(run: LoggedRun) -> int:
    """Episodes per sample of an evaluation."""
    return (run.settings.get("config", {}).get("eval") or {}).get("num_samples", 1)


def _entry(number: int, run: LoggedRun, num_bytes: int, record: Mapping[str, Any]) -> tuple[PageDict, PageDict]:
    """Converts an episode of a run, to its row and its content.

    Adds the episode's settings: reward weights, the public split, and no frame budget in SFT without gating.
    """
    settings = run.settings_at(record.get("step"))
    config = settings.get("config", {})
    split, rewards = (config.get("data") or {}).get("split"), config.get("reward") or {}
    fields = {"weights": {term: rewards[key] for term in WEIGHTED if (key := f"{term}_weight") in rewards}}
    fields |= {"split": split} if split else {}
    if kind_of(config) == "imitation" and not (config.get("video") or {}).get("frame_budgets"):
        fields |= {"frame_budget": None}
    episode = convert_within(num_bytes, {**record, **fields}, _forced(settings))
    return row_of(episode, number), episode


def _forced(settings: Mapping[str, Any]) -> str:
    return (settings.get("config", {}).get("rollout") or {}).get("forced_prefix", "")


def _policy(style: str, script: str, *, pictured: bool) -> str:
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; {'img-src data:; ' if pictured else ''}"
        f"style-src {_hash(style)}; script-src {_hash(script)}; "
        f"require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
