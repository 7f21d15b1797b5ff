"""Writes the report page: one file with markup, style, scripts, and the data as JSON.

The data are escaped so that no text in them can close their script element, and the scripts show them with textContent
only. The content security policy allows this style and these scripts by hash, and pictures embedded in the page, but no
network. Episodes are in a separate element, one per line; the page parses an episode when you open it.
"""

import base64
import hashlib
import html
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from model_port.terminal import visible
from paravt_jax import view
from paravt_jax.run.log import METRICS_FILE
from paravt_jax.run.plots import load_run
from paravt_jax.view.cells import load_cells
from paravt_jax.view.episodes import Shown, row_of, share_bytes, shown_within
from paravt_jax.view.figures import about, charts, headlines, load_settings, told
from paravt_jax.view.pictures import Album, make_album
from paravt_jax.view.records import Chosen, cells_of, chosen_of_cells, chosen_of_steps, steps_of

SCRIPTS = ("dom", "charts", "head", "film", "reader", "list", "page")  # concatenated into one script, in this order


def make_page(run_dirs: Sequence[Path], max_episodes: int, *, frames: bool = False) -> bytes:
    """Builds the page for one run, or two side by side, finished or not. `frames` adds pictures from the videos."""
    settings = [_settings(run_dir) for run_dir in run_dirs]
    chosen = _chosen(run_dirs, settings, max_episodes)
    num_bytes = share_bytes(sum(len(one.lines) for one in chosen))
    of_runs = [
        [shown_within(num_bytes, record | _split(of_run), _forced(of_run)) for record in one.records()]
        for one, of_run in zip(chosen, settings, strict=True)
    ]
    episodes = [episode for of_run in of_runs for episode in of_run]
    runs = [_run(*one, max_episodes) for one in zip(run_dirs, settings, chosen, of_runs, strict=True)]
    rows = [row_of(episode, number) for number, of_run in enumerate(of_runs) for episode in of_run]
    title = " and ".join(run["about"]["name"] for run in runs)
    return rendered(title, runs, rows, episodes, make_album(episodes) if frames else None)


def question_page(
    settings: Mapping[str, Any], record: Mapping[str, Any], answer: Mapping[str, Any], pictures: Mapping[str, str]
) -> bytes:
    """Builds the page for a question with its episode and answer. `pictures` maps strip keys to base64 images."""
    episode = shown_within(share_bytes(1), record, _forced(settings))
    album = Album.of(pictures, [episode])
    head = {"kind": "question", "name": episode["question"], "steps_done": 0, "steps_planned": None, **told(settings)}
    run = {"about": head, "figures": None, "cells": [], "answer": answer}
    return rendered(episode["question"], [run], [row_of(episode, 0)], [episode], album)


def rendered(
    title: str, runs: Sequence[Any], rows: Sequence[Shown], episodes: Sequence[Shown], album: Album | None
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


def _settings(run_dir: Path) -> dict[str, Any]:
    settings = load_settings(run_dir)
    if not settings and not (run_dir / METRICS_FILE).exists() and not steps_of(run_dir) and not cells_of(run_dir):
        raise ValueError(
            f"{run_dir} is no run: it has no {METRICS_FILE}, no episodes or samples and no config.json of a run; give "
            f"the directory that was the run's run_dir"
        )
    return settings


def _chosen(run_dirs: Sequence[Path], settings: Sequence[Mapping[str, Any]], max_episodes: int) -> list[Chosen]:
    """Chooses an equal share of episodes per run. Two training runs use the steps they have in common, if any."""
    share = max_episodes // len(run_dirs)
    steps = [steps_of(run_dir) for run_dir in run_dirs]
    both = set.intersection(*map(set, steps))
    if both and len(run_dirs) > 1:
        steps = [{step: path for step, path in of_run.items() if step in both} for of_run in steps]
    return [
        chosen_of_steps(list(of_run.values()), share)
        if of_run
        else chosen_of_cells(cells_of(run_dir), share // _num_samples(of_settings))
        for run_dir, of_settings, of_run in zip(run_dirs, settings, steps, strict=True)
    ]


def _run(
    run_dir: Path, settings: Mapping[str, Any], chosen: Chosen, episodes: Sequence[Shown], max_episodes: int
) -> dict[str, Any]:
    run = load_run(run_dir)
    return {
        "about": about(run, settings),
        "headlines": headlines(run),
        "figures": charts(run),
        "cells": load_cells(run_dir, cells_of(run_dir)),
        "num_shown": len(episodes),
        "num_parts_shown": chosen.num_parts_shown,
        "num_parts": chosen.num_parts,
        "max_episodes": max_episodes,
    }


def _num_samples(settings: Mapping[str, Any]) -> int:
    """Episodes per sample of an evaluation."""
    return (settings.get("config", {}).get("eval") or {}).get("num_samples", 1)


def _split(settings: Mapping[str, Any]) -> dict[str, str]:
    """The public split of an evaluation, which distinguishes its episodes from another split's."""
    split = (settings.get("config", {}).get("data") or {}).get("split")
    return {"split": split} if split else {}


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
