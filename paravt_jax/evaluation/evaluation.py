"""State of an evaluation, and how a cell is filled."""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from model_port.json_files import parse_object
from model_port.model import VLModel
from model_port.progress import in_units
from model_port.terminal import say
from paravt_jax.config import EngineConfig, EvalCell, EvalConfig, EvaluationConfig, computed_on, to_record
from paravt_jax.data.splits import Sample, split_named
from paravt_jax.data.splits.reading import SampleSet, load_samples
from paravt_jax.evaluation.certificate import certificate
from paravt_jax.evaluation.provenance import (
    TEXTS_DIGEST,
    cell_provenance,
    changed_sections,
    digest,
    digest_of_requests,
    engine_record,
    model_record,
    run_provenance,
    scorer_digest,
    settings_key,
    with_other_models,
)
from paravt_jax.evaluation.release.dialogue import TEMPERATURE, ReleaseAgent
from paravt_jax.evaluation.release.pictures import ReleasePictures
from paravt_jax.evaluation.release.recorder import ReleaseRecorder, release_texts
from paravt_jax.evaluation.release.texts import ReleaseTexts
from paravt_jax.evaluation.results import Cell, Shard
from paravt_jax.evaluation.runner import EpisodeRecorder, Recorder, run_samples
from paravt_jax.evaluation.sample_log import SHARDS_DIR, SampleLog, SampleResult, cell_name, sample_key
from paravt_jax.rewards.judge import Judge
from paravt_jax.rewards.plugin import load_plugin
from paravt_jax.rl.episodes import RolloutWorker
from paravt_jax.run.directory import check_kind, locked, settings_of, write_settings
from paravt_jax.run.fingerprints import own_sums
from paravt_jax.run.gpu_assignment import Gpus, place_servers
from paravt_jax.run.log import write_json
from paravt_jax.run.policy import Policy, policy_of
from paravt_jax.run.process import ended_by_interrupt
from paravt_jax.run.start import find_devices
from paravt_jax.run.threads import in_thread
from paravt_jax.sampling.endpoint import endpoint_contract, open_endpoint, served_files
from paravt_jax.sampling.engines import frame_reader, open_engine, own_engine, report_unreachable
from paravt_jax.sampling.local_copy import by_layer
from rollout.endpoint.agent import EndpointAgent
from rollout.endpoint.check import check_video
from rollout.endpoint.client import EndpointClient
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.toolbox import forget_user_code
from rollout.video.reader import FrameReader

PLAYED_FILE = "played_by.json"
OF_SAMPLES = ("n", "scores", "metrics", "by_type")  # certificate fields that change if the samples change


@dataclass(frozen=True, eq=False)
class Evaluation:
    """An open evaluation. Use `async with open_evaluation(config) as evaluation`."""

    directory: Path
    settings: EvaluationConfig
    rollout: EpisodeConfig
    record: Mapping[str, Any]  # the content of RUN/config.json
    provenance: Mapping[str, Any]  # shared by all cells
    loaded: SampleSet
    samples: Sequence[Sample]  # the samples of this run or shard
    worker: RolloutWorker | ReleaseAgent | None = None  # None if every sample is done

    async def fill(self, spec: EvalCell) -> None:
        """Runs the remaining samples of a cell, then writes its certificate. A finished cell is not changed."""
        keys, log = self._keys(spec), self._log(spec)
        finished = log.read(keys)
        todo = _remaining(keys, finished)
        file = self._cell_file(spec)
        if todo:
            assert self.worker is not None
            done = [result for key, result in finished.items() if key not in todo]
            await run_samples(self._name(spec), self._recorder(self.worker, spec), todo, log, done)
        results = log.read(keys)
        cell = json.loads(json.dumps(self._certified(spec, [results[key] for key in keys if key in results])))
        old = _certificate_in(file)
        if not todo and old and all(old.get(name) == cell[name] for name in OF_SAMPLES):
            return
        write_json(file, cell)

    def cell(self, spec: EvalCell) -> Cell:
        return json.loads(self._cell_file(spec).read_bytes())

    def is_done(self) -> bool:
        cells = [(self._keys(spec), self._log(spec)) for spec in self.settings.cells]
        return not any(_remaining(keys, log.read(keys)) for keys, log in cells)

    def is_scorer_changed(self) -> bool:
        """Whether the code that scores differs from the code that scored this directory's samples."""
        scorer = self.provenance["hashes"]["scorer"]
        return any(played.get("scorer", scorer) != scorer for played in _played_by(self.directory))

    def check_scorer(self) -> None:
        """Raises if the code that scores has changed since a sample was scored."""
        results = (result for spec in self.settings.cells for result in self._log(spec).read(self._keys(spec)).values())
        if self.is_scorer_changed() and not all(result.missing for result in results):
            raise ValueError(
                f"{self.directory} has samples with scores of another scorer: the code of reward.plugin or data.split, "
                f"or of this package, has changed; choose another run_dir"
            )

    def older_parts(self) -> list[str]:
        """The parts of a finished evaluation that have changed since its samples ran."""
        models = [played["model"] for played in _played_by(self.directory)]
        changed = any(_has_other_files(model) for model in models)
        parts = ["older scoring code"] if self.is_scorer_changed() else []
        return parts + ([f"older files of {models[0]['path']}"] if changed else [])

    def _keys(self, spec: EvalCell) -> dict[str, Sample]:
        settings = settings_key(self.record, spec)
        return {sample_key(settings, sample): sample for sample in self.samples}

    def _log(self, spec: EvalCell) -> SampleLog:
        return SampleLog(self.directory, cell_name(spec))

    def _cell_file(self, spec: EvalCell) -> Path:
        return self.directory / f"cell_{cell_name(spec)}.json"

    def _name(self, spec: EvalCell) -> str:
        split = self.loaded.split
        parts = [split.name if split else "", spec.dispatch, f"{spec.frame_budget} frames"]
        parts += [] if spec.temperature is None else [f"temperature {spec.temperature:g}"]
        return ", ".join(filter(None, parts))

    def _recorder(self, worker: RolloutWorker | ReleaseAgent, spec: EvalCell) -> Recorder:
        split = self.loaded.split
        if isinstance(worker, ReleaseAgent):
            assert split is not None
            return ReleaseRecorder(split, worker)
        worker = replace(worker, agent=worker.agent.with_config(self.settings.episode(self.rollout, spec)))
        return EpisodeRecorder(worker, split, spec.frame_budget, self.settings.num_samples)

    def _certified(self, spec: EvalCell, results: Sequence[SampleResult]) -> Cell:
        name, problems = self._name(spec), [result.problem for result in results if result.missing]
        if len(problems) == len(results):
            raise RuntimeError(f"{name}: every sample is missing; for example {problems[0]}")
        if problems:
            missing = in_units([len(problems), len(results)], "sample")
            say(f"{name}: {missing} missing, for example {problems[0]}")
        episode = self.settings.episode(self.rollout, spec)
        about = cell_provenance(self.provenance, episode, spec.frame_budget, _played_by(self.directory))
        if sent := digest_of_requests(results):
            about["hashes"] |= {"requests": sent}
        is_whole = len(self.samples) == len(self.loaded.samples)
        bad = self.loaded.bad if is_whole else {}  # not of a shard, or of a run of the first prompts only
        return certificate(self.loaded.split, len(self.samples) + sum(bad.values()), bad, results, about)


def _certificate_in(file: Path) -> Cell:
    """Reads a certificate; empty if there is none, or a damaged one, which can be written again from the samples."""
    with suppress(FileNotFoundError, ValueError):
        return parse_object(file.read_bytes(), file)
    return {}


def _remaining(keys: Mapping[str, Sample], results: Mapping[str, SampleResult]) -> dict[str, Sample]:
    """The samples without a record, or whose record is missing an episode."""
    return {key: sample for key, sample in keys.items() if key not in results or results[key].missing}


@asynccontextmanager
async def open_evaluation(config: EvalConfig, shard: Shard | None = None) -> AsyncIterator[Evaluation]:
    """Opens an evaluation or one shard of it. The model is loaded only if samples remain."""
    forget_user_code()
    async with AsyncExitStack() as stack:
        directory = stack.enter_context(locked(_directory(Path(config.run_dir), shard)))
        texts = release_texts(config.eval, config.data.split) if config.eval.protocol == "release" else None
        plugin, data, record = load_plugin(config.reward), config.data, to_record(config)
        own_engine(config.engine)  # fail early if the user's file does not load
        check_kind(record, Path(config.run_dir))
        loaded = load_samples(
            split_named(data.split) if data.split else None,
            data.validation,
            video_root=data.video_root,
            max_bad_frac=data.max_bad_frac,
            allow_outside=data.allow_outside,
            columns=plugin.columns if plugin else None,
        )
        if texts is not None:
            record["eval"][TEXTS_DIGEST] = digest(dict(texts.texts))
        _check_same(directory, record)
        write_settings(record, directory, own_code=own_sums(record))
        samples = loaded.samples[: config.eval.max_prompts]
        number, num_shards = shard or (1, 1)
        provenance, own = run_provenance(config, loaded), samples[number - 1 :: num_shards]
        evaluation = Evaluation(directory, config.eval, config.rollout, record, provenance, loaded, own)
        if not evaluation.samples:
            raise ValueError(f"--shard {number}/{num_shards} has none of {len(samples)} samples")
        if not evaluation.is_done():
            evaluation.check_scorer()
            opening = config, directory, stack, evaluation.samples
            with ended_by_interrupt():
                worker = await (_open_worker(*opening) if texts is None else _open_release_agent(*opening, texts))
            evaluation = replace(evaluation, worker=worker)
        elif older := evaluation.older_parts():
            say(
                f"{directory} is complete: these are the scores of {' and '.join(older)}; to evaluate again, choose "
                f"another run_dir"
            )
        yield evaluation


async def _open_release_agent(
    config: EvalConfig, directory: Path, stack: AsyncExitStack, samples: Sequence[Sample], texts: ReleaseTexts
) -> ReleaseAgent:
    gpus = place_servers(config.engine, 0)
    config = computed_on(config, _platform_of_servers(config.engine, gpus))
    client, frames = await _endpoint(config, directory, stack, samples, gpus)
    pictures = ReleasePictures(frames, config.rollout.min_video_deadline_s)
    mode, channel = config.eval.mode_of(config.data.split), config.eval.channel_of(config.data.split)
    videos = (Path(video) for sample in samples for video in sample.prompt.videos)
    if channel == "video_url" and (readable := next(filter(Path.is_file, videos), None)):
        await check_video(client, readable, TEMPERATURE)
    return ReleaseAgent(client, pictures, texts, mode, channel)


def _platform_of_servers(engine: EngineConfig, gpus: Sequence[Gpus]) -> str:
    """The platform of the servers. Servers that this evaluation does not start are assumed to have GPUs."""
    return "cpu" if engine.starts_servers and not gpus else "cuda"


async def _open_worker(
    config: EvalConfig, directory: Path, stack: AsyncExitStack, samples: Sequence[Sample]
) -> RolloutWorker:
    gpus = place_servers(config.engine, 0)  # all GPUs are for the servers
    own = config.engine.kind == "jax"
    platform = (await in_thread(find_devices))[0].platform if own else _platform_of_servers(config.engine, gpus)
    config = computed_on(config, platform)
    judge = await stack.enter_async_context(Judge(config.judge)) if config.judge.is_set else None
    plugin = load_plugin(config.reward)
    if config.engine.kind == "openai":
        agent = EndpointAgent(*await _endpoint(config, directory, stack, samples, gpus), config.rollout)
    else:
        agent = await _agent(config, directory, stack, samples, gpus)
    return RolloutWorker(agent, config.reward, judge, config.seed, plugin)


async def _endpoint(
    config: EvalConfig, directory: Path, stack: AsyncExitStack, samples: Sequence[Sample], gpus: Sequence[Gpus]
) -> tuple[EndpointClient, FrameReader]:
    """Opens a client of an endpoint. No model is loaded, so the endpoint may serve any model."""
    name = config.engine.model or config.model.path
    files = await served_files(config.engine, config.model.path)
    model = await in_thread(lambda: model_record(name, files))
    _check_model(directory, model)
    say(f"model: {name}, behind an endpoint | data: {in_units([len(samples)], 'sample')} | run_dir: {directory}")
    dtype, as_released = config.model.dtype, config.eval.protocol == "release"
    client = await open_endpoint(
        config.engine, name, files, stack, config.rollout, gpus=gpus, dtype=dtype, as_released=as_released
    )
    contract = endpoint_contract(config.video.max_pixels)
    frames = await stack.enter_async_context(frame_reader(config.video, contract, config.rollout.detail_factor))
    engine = {"kind": config.engine.kind, "serve_with": config.engine.serve_with}
    _write_played(config, directory, model, engine)
    return client, frames


async def _agent(
    config: EvalConfig, directory: Path, stack: AsyncExitStack, samples: Sequence[Sample], gpus: Sequence[Gpus]
) -> Agent:
    await report_unreachable(config.engine)
    policy = await policy_of(config, directory, data=in_units([len(samples)], "sample"))
    if policy.adapter is not None and config.engine.kind == "sglang":
        raise ValueError(
            f"model.path={config.model.path} is an adapter, and SGLang servers need a merged model: merge it with "
            f"python -m model_port.export --src {quote(config.model.path)} --dst DIR, or set engine.kind=jax"
        )
    model = model_record(config.model.path, policy.adapter or policy.source)
    _check_model(directory, model)
    frames = await stack.enter_async_context(frame_reader(config.video, policy.contract, config.rollout.detail_factor))
    frozen = await in_thread(lambda: _frozen_model(policy)) if config.engine.kind == "jax" else None
    engine = await open_engine(config.engine, policy, config.rollout, frozen, 0, say, gpus=gpus)
    stack.push_async_callback(engine.close)
    record = await engine_record(config.engine, engine)
    if others := with_other_models(record, model):
        say(
            f"the certificate records the files of {config.model.path}, but these servers read other paths: "
            f"{', '.join(others)}; paravt gate --model {quote(config.model.path)} --url URL compares the weights"
        )
    _write_played(config, directory, model, record)
    return Agent(engine, frames, policy.chat, config.rollout)


def _frozen_model(policy: Policy) -> VLModel:
    model = policy.load(is_frozen=True)
    return by_layer(model) if policy.mesh is None else model


def _directory(run_dir: Path, shard: Shard | None) -> Path:
    return run_dir if shard is None else run_dir / SHARDS_DIR / f"{shard[0]}_of_{shard[1]}"


def _check_same(directory: Path, record: Mapping[str, Any]) -> None:
    """Raises ValueError if the directory or one of its shards has cells with other settings."""
    for part in (directory, *sorted(directory.glob(f"{SHARDS_DIR}/*"))):
        old = settings_of(part)
        changed = changed_sections(record, old) if old and any(part.glob("samples_*.jsonl")) else []
        if part != directory and record["data"]["split"] == (old.get("data") or {}).get("split"):
            changed = [name for name in changed if name != "data"]  # its machine may have the rows elsewhere
        if changed:
            raise ValueError(
                f"{part} has cells of an evaluation with other settings ({', '.join(changed)}); choose another run_dir"
            )


def _check_model(directory: Path, model: Mapping[str, Any]) -> None:
    """Raises ValueError if the directory has samples of another model, even one with the same path."""
    if any(played["model"]["digest"] != model["digest"] for played in _played_by(directory)):
        raise ValueError(
            f"{directory} has samples of another model: the files of {model['path']} have changed; choose another "
            f"run_dir"
        )


def _has_other_files(model: Mapping[str, Any]) -> bool:
    """Whether the directory of a recorded model has other files now; False if it is not on this machine any more."""
    source = model.get("source")
    return bool(source) and Path(source).is_dir() and model_record("", Path(source))["digest"] != model["digest"]


def _write_played(config: EvalConfig, directory: Path, model: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    scorer = scorer_digest(config.reward, config.judge, config.data.split)
    write_json(directory / PLAYED_FILE, {"model": model, "engine": engine, "scorer": scorer})


def _played_by(directory: Path) -> list[dict[str, Any]]:
    """Reads model, engine and scorer of the run and of each shard. All must have the same model and scorer."""
    files = [directory / PLAYED_FILE, *sorted(directory.glob(f"{SHARDS_DIR}/*/{PLAYED_FILE}"))]
    played = [_read_played(file) for file in files if file.exists()]
    models = {record["model"]["digest"] for record in played}
    scorers = {record["scorer"] for record in played if "scorer" in record}
    for name, digests in (("models", models), ("scorers", scorers)):
        if len(digests) > 1:
            raise ValueError(f"{directory}: its shards have different {name} (see their {PLAYED_FILE})")
    return played


def _read_played(file: Path) -> dict[str, Any]:
    way_out = "restore the file, or choose another run_dir"
    try:
        record = parse_object(file.read_bytes(), file)
    except ValueError as problem:
        raise ValueError(f"{problem}; {way_out}") from None
    if not isinstance(record.get("model"), dict) or "digest" not in record["model"] or "engine" not in record:
        raise ValueError(f"{file} does not name the model and the engine of the samples; {way_out}")
    return record
