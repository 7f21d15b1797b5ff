"""What a certificate says of how a cell came about: data, words, schemas, scorers, model, engine, versions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt_jax import rewards
from paravt_jax.config import EngineConfig, EvalConfig
from paravt_jax.data.splits.reading import SampleSet
from paravt_jax.run.directory import versions
from rollout.engine.http import HttpClient
from rollout.engine.protocol import Engine
from rollout.episode import Dispatch

SCORERS = ("answers", "grammar", "official", "terms")  # the modules of `paravt_jax/rewards` that make a score
ABOUT_THE_MACHINE = ("run_dir", "engine", "mesh", "eval")  # no answer depends on these sections, but on OF_EVAL
OF_EVAL = ("mode", "num_samples")
PIECE_BYTES = 2**16
SERVER_DEADLINE_S = 30.0


def settings_key(record: Mapping[str, Any], dispatch: Dispatch, frame_budget: int) -> str:
    """Of all settings that an answer depends on, but for what lies where; `record` has all of a run."""
    settings = {name: value for name, value in record.items() if name not in (*ABOUT_THE_MACHINE, "data")}
    evaluated = [*(record["eval"][name] for name in OF_EVAL), dispatch, frame_budget, record["data"]["split"]]
    return digest([settings, evaluated])


def changed_sections(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """What an answer depends on and is set otherwise than before."""
    changed = sorted(key for key in now if key not in ABOUT_THE_MACHINE and before.get(key) != now[key])
    return changed + [f"eval.{key}" for key in OF_EVAL if before["eval"].get(key) != now["eval"][key]]


def provenance(
    config: EvalConfig,
    loaded: SampleSet,
    played: Sequence[Mapping[str, Any]],
    dispatch: Dispatch,
    frame_budget: int,
) -> dict[str, Any]:
    """`played` says which model and engine it was, of a run and of each of its shards."""
    episode = config.episode(dispatch)
    repository = loaded.split.repo if loaded.split else config.data.validation
    return {
        "dispatch": dispatch,
        "frame_budget": frame_budget,
        "mode": config.eval.mode,
        "num_samples": config.eval.num_samples,
        "seed": config.seed,
        "data": {"repository": repository, "revision": loaded.revision, "sha256": dict(loaded.files)},
        "hashes": {
            "prompt": digest([asdict(episode.prompts), episode.forced_prefix]),
            "schema": digest([tool.spec.schema for tool in episode.toolbox] if episode.calls_per_turn else []),
            "scorer": scorer_digest(config),
        },
        "model": played[0]["model"] if played else {"path": config.model.path},
        "engines": [one["engine"] for one in played],
        **versions(),
    }


def scorer_digest(config: EvalConfig) -> str:
    """Of the rules as they stand in the source, and of what the run has set."""
    folder = Path(rewards.__file__).parent
    sources = [(folder / f"{name}.py").read_text() for name in SCORERS]
    return digest([sources, asdict(config.reward), config.judge and config.judge.model])


def model_record(path: str, source: Path) -> dict[str, Any]:
    """Which model it is: its files by name and size, and three pieces of each, which other weights would not share."""
    files = sorted(file for file in source.rglob("*") if file.is_file())
    tasted = [[file.relative_to(source).as_posix(), *_taste(file)] for file in files]
    return {"path": path, "source": str(source), "digest": digest(tasted)}


async def engine_record(settings: EngineConfig, engine: Engine) -> dict[str, Any]:
    """What samples, and of which version its servers are."""
    record: dict[str, Any] = {"kind": settings.kind}
    if settings.kind == "jax":
        return record
    client = HttpClient.make()
    try:
        urls = [server.url for server in (await engine.health()).servers if server.alive]
        infos = [await client.get(f"{url}/server_info", SERVER_DEADLINE_S) for url in urls]
    finally:
        await client.close()
    return record | {"servers": {url: info.get("version") for url, info in zip(urls, infos, strict=True)}}


def _taste(file: Path) -> tuple[int, str]:
    """The size of a file, and a digest of its beginning, middle and end: 16 GB of weights are not read for a name."""
    num_bytes, pieces = file.stat().st_size, hashlib.blake2b(digest_size=12)
    with file.open("rb") as content:
        for start in (0, num_bytes // 2, max(0, num_bytes - PIECE_BYTES)):
            content.seek(start)
            pieces.update(content.read(PIECE_BYTES))
    return num_bytes, pieces.hexdigest()


def digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
