"""The provenance in a certificate: data, prompts, tool schemas, scorers, model, engine and versions."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paravt_jax import rewards
from paravt_jax.config import EngineConfig, EvalCell, EvalConfig
from paravt_jax.data.splits.reading import SampleSet
from paravt_jax.evaluation.release import questions
from paravt_jax.evaluation.sample_log import SampleResult
from paravt_jax.rewards.judge import JudgeConfig
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.run.directory import versions
from paravt_jax.run.fingerprints import fingerprint_of, own_files
from rollout import tools
from rollout.engine.http import HttpClient
from rollout.engine.protocol import Engine
from rollout.episode_config import EpisodeConfig

SCORERS = ("answers", "grammar", "official", "release", "terms")  # modules of `paravt_jax/rewards` that affect a score
ABOUT_THE_MACHINE = ("run_dir", "engine", "mesh", "eval")  # sections that do not affect answers, except EVAL_KEYS
TEXTS_DIGEST = "release_texts_digest"  # extra key of a record: a hash of eval.release_texts
EVAL_KEYS = ("mode", "num_samples", "protocol", "channel", TEXTS_DIGEST)
SERVER_DEADLINE_S = 30.0


def settings_key(record: Mapping[str, Any], cell: EvalCell) -> str:
    """A hash of all settings in `record` that affect answers, without paths."""
    settings = {name: value for name, value in record.items() if name not in (*ABOUT_THE_MACHINE, "data")}
    return digest([settings, _evaluated(record), *cell, record["data"]["split"], _endpoint(record)])


def _evaluated(record: Mapping[str, Any]) -> dict[str, Any]:
    return {f"eval.{name}": record["eval"].get(name) for name in EVAL_KEYS}


def _endpoint(record: Mapping[str, Any]) -> list[str]:
    """The kind and model of an endpoint, the only engine settings that affect answers."""
    engine = record["engine"]
    return [engine["kind"], engine["model"]] if engine["kind"] == "openai" else []


def changed_sections(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """The settings that affect answers and differ from an earlier run's."""
    changed = sorted(key for key in new if key not in ABOUT_THE_MACHINE and old.get(key) != new[key])
    changed += ["engine.model"] if _endpoint(new) != _endpoint(old) else []
    return changed + [name for name, value in _evaluated(new).items() if _evaluated(old)[name] != value]


def run_provenance(config: EvalConfig, loaded: SampleSet) -> dict[str, Any]:
    """The provenance that all cells of an evaluation share."""
    settings, data = config.eval, config.data
    repository = loaded.split.repo if loaded.split else data.validation
    return {
        "protocol": settings.protocol,
        "mode": settings.mode_of(loaded.split.name if loaded.split else ""),
        "published_row": settings.published_row,
        "num_samples": settings.num_samples,
        "seed": config.seed,
        "data": {"repository": repository, "revision": loaded.revision, "sha256": dict(loaded.files)},
        "hashes": {"scorer": scorer_digest(config.reward, config.judge, data.split)},
        "model": {"path": config.model.path},
        **versions(),
    }


def cell_provenance(
    run: Mapping[str, Any], episode: EpisodeConfig, frame_budget: int, played: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The provenance of one cell. `played` has model, engine and scorer of the run and of each shard."""
    hashes = {
        "prompt": digest([asdict(episode.prompts), episode.forced_prefix]),
        "schema": digest([tool.spec.schema for tool in episode.toolbox] if episode.calls_per_turn else []),
    }
    if played and "scorer" in played[0]:
        hashes["scorer"] = played[0]["scorer"]
    return {
        "dispatch": episode.dispatch,
        "frame_budget": frame_budget,
        "temperature": episode.temperature,
        **run,
        "hashes": run["hashes"] | hashes,
        "model": played[0]["model"] if played else run["model"],
        "engines": [record["engine"] for record in played],
    }


def scorer_digest(reward: RewardConfig, judge: JudgeConfig, split: str) -> str:
    """A hash of the scorers' source code and settings, with the files of a plugin and of your own split."""
    folder = Path(rewards.__file__).parent
    files = [folder / f"{name}.py" for name in (*SCORERS, *["judge"] * judge.is_set)]
    files += [Path(tools.__file__), Path(questions.__file__)]  # these parse times and the release's ground truths
    sources = [file.read_text() for file in files]
    sources += [path.read_text() for _, path in own_files(asdict(reward) | {"split": split})]
    return digest([sources, asdict(reward), judge.model or None])


def model_record(path: str, source: Path | None) -> dict[str, Any]:
    """Identifies a model by its files' names, sizes and three pieces of each; without files by its name."""
    if source is None:
        return {"path": path, "source": None, "digest": digest(path)}
    files = sorted(file for file in source.rglob("*") if file.is_file())
    fingerprints = [[file.relative_to(source).as_posix(), *fingerprint_of(file)] for file in files]
    return {"path": path, "source": str(source), "digest": digest(fingerprints)}


def digest_of_requests(results: Sequence[SampleResult]) -> str:
    """A hash of all requests to an endpoint for the complete samples; empty with other engines."""
    complete = [result for result in results if not result.missing]
    sent = {result.key: [episode.get("sent") for episode in result.episodes] for result in complete}
    return digest(sent) if any(map(any, sent.values())) else ""


async def engine_record(settings: EngineConfig, engine: Engine) -> dict[str, Any]:
    """Records the kind of engine, and the version and model of each server."""
    record: dict[str, Any] = {"kind": settings.kind}
    if settings.kind != "sglang":
        return record
    async with HttpClient() as client:
        urls = [server.url for server in (await engine.health()).servers if server.alive]
        infos = [
            [await client.get(f"{url}/{name}", SERVER_DEADLINE_S) for name in ("server_info", "model_info")]
            for url in urls
        ]
    servers = {
        url: {"version": of_server.get("version"), "model": of_model.get("model_path")}
        for url, (of_server, of_model) in zip(urls, infos, strict=True)
    }
    return record | {"servers": servers}


def with_other_models(engine: Mapping[str, Any], model: Mapping[str, Any]) -> list[str]:
    """The servers that loaded other files than the certificate's model, or the same files under another name."""
    models = {url: server["model"] for url, server in engine.get("servers", {}).items()}
    return [f"{url} ({read})" for url, read in models.items() if read not in (model["path"], model["source"])]


def digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=12).hexdigest()
