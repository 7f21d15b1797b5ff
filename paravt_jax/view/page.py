"""Puts what is known of a run into one file: markup, style, script, and the data as JSON.

The data are escaped so that no text in them can end the script element they are in; the script shows them with
textContent alone. The page's own policy allows nothing but this style and this script, by their hashes, and no network.
"""

import base64
import hashlib
import html
import json
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from paravt_jax import view
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE
from paravt_jax.run.plots import load_run
from paravt_jax.view.episodes import load_sample, visible
from paravt_jax.view.figures import about, charts, headlines, load_settings

BEGINNING = b'<!doctype html>\n<html lang="en" data-made-by="paravt_jax.view">'


def make_page(run_dir: Path, max_episodes: int) -> bytes:
    """The page of what a run has logged so far."""
    settings = load_settings(run_dir)
    if not settings and not (run_dir / METRICS_FILE).exists() and not (run_dir / EPISODES_DIR).is_dir():
        raise ValueError(
            f"{run_dir} is no run: it has no {METRICS_FILE}, no {EPISODES_DIR}/ and no config.json of a run; give the "
            f"directory that was the run's run_dir"
        )
    run = load_run(run_dir)
    data = {
        "about": about(run, settings),
        "headlines": headlines(run),
        "figures": charts(run),
        "sample": load_sample(run_dir, max_episodes, settings),
        "made_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }
    markup, style, script = (files(view).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("html", "css", "js"))
    page = Template(markup).substitute(  # in one pass: a text with a placeholder in it stays as it is
        title=html.escape(visible(run.name)),
        policy=html.escape(_policy(style, script)),
        style=style,
        script=script,
        data=embedded(data),
    )
    return page.encode()


def is_page(path: Path) -> bool:
    """Whether a file was written by this command."""
    with path.open("rb") as file:
        return file.read(len(BEGINNING)) == BEGINNING


def embedded(data: Any) -> str:
    """JSON for a script element: plain ASCII without `<`, `>` and `&`, so that nothing in it is markup."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; "
        f"style-src {_hash(style)}; script-src {_hash(script)}; "
        f"require-trusted-types-for 'script'; trusted-types 'none'"
    )


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
