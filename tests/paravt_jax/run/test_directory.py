"""A run directory's settings, commit and id."""

import asyncio
import json
import re
import shutil
import subprocess
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
from async_tests import async_test

from paravt_jax.config import Config, EvalConfig, EvalDataConfig, SftConfig, load_config, to_record
from paravt_jax.evaluation.evaluation import open_evaluation
from paravt_jax.imitation.run import open_sft_run
from paravt_jax.rl.setup import open_run
from paravt_jax.run import directory as module
from paravt_jax.run.directory import (
    OWN_CODE,
    TOKEN_FILE,
    _commit,
    changed_settings,
    check_kind,
    check_not_in_a_run,
    locked,
    locked_by_host_0,
    run_id,
    write_settings,
)
from paravt_jax.run.fingerprints import own_sums
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.run.log import load_jsonl
from paravt_jax.run.training import RunDirectory
from rollout.engine.labels import Label


def git(directory: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=directory, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_only_the_repository_that_tracks_the_code_is_recorded(tmp_path):
    git(tmp_path, "init", "-q")
    file = Path(shutil.copy(module.__file__, tmp_path))
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert _commit(file) is None  # untracked in another project's repository, like an environment
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "ours")
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert _commit(file) == commit
    file.write_text("")
    assert _commit(file) == f"{commit}-dirty"
    assert _commit(Path("/") / file.name) is None


OF_KIND = {
    "an RL run": to_record(Config()),
    "an SFT run": to_record(SftConfig()),
    "an evaluation": to_record(EvalConfig(data=EvalDataConfig(validation="rows.jsonl"))),
}


@pytest.mark.parametrize(("old", "results"), [*zip(OF_KIND, ["metrics", "metrics", "samples_none_4"], strict=True)])
def test_a_run_does_not_replace_the_settings_of_another_kind_of_run(tmp_path, old, results):
    (tmp_path / f"{results}.jsonl").touch()
    check_kind(OF_KIND["an RL run"], tmp_path)  # without settings, the kind is unknown
    (tmp_path / f"{results}.jsonl").unlink()
    write_settings(OF_KIND[old], tmp_path)
    for settings in OF_KIND.values():
        check_kind(settings, tmp_path)  # without results, nothing is lost
    (tmp_path / f"{results}.jsonl").touch()
    for new, settings in OF_KIND.items():
        message = f"run_dir={tmp_path} has the results of {old}; choose another run_dir for {new}$"
        with nullcontext() if new == old else pytest.raises(ValueError, match=message):
            check_kind(settings, tmp_path)


@pytest.mark.parametrize("shard", [None, (1, 2)])
def test_an_evaluation_in_the_directory_of_a_training_is_an_error(tmp_path, shard):
    write_settings(OF_KIND["an RL run"], tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    config = EvalConfig(run_dir=str(tmp_path), data=EvalDataConfig(validation="rows.jsonl"))
    with pytest.raises(ValueError, match="has the results of an RL run"):
        asyncio.run(open_evaluation(config, shard).__aenter__())
    with pytest.raises(ValueError, match="has the results of an RL run"):
        asyncio.run(open_sft_run(SftConfig(run_dir=str(tmp_path))).__aenter__())


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _commit(Path(module.__file__)) is None


@pytest.mark.parametrize("inside", ["", "run"])
def test_a_run_dir_that_cannot_be_a_directory_is_named_with_its_key(inside, tmp_path):
    (file := tmp_path / "file").write_text("any")
    with pytest.raises(ValueError, match=r"^run_dir=\S+ cannot be written \(\S+: .*\); choose another run_dir$"):
        locked(file / inside).__enter__()
    assert file.read_text() == "any"


def test_a_run_directory_has_no_dots_and_keeps_links(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "link").symlink_to(tmp_path / "here")
    for name, directory in (("../run", "run"), (tmp_path / "link" / "run", "link/run")):
        with locked(name) as run, locked_by_host_0(f"{name}2", ALONE) as second:
            assert (run, second) == (tmp_path / directory, tmp_path / f"{directory}2")


@pytest.mark.parametrize(("content", "is_same"), [(None, False), ("of an earlier run", False), ("of host 0", True)])
def test_a_host_that_does_not_see_the_lock_of_host_0_is_rejected(content, is_same, tmp_path, monkeypatch):
    monkeypatch.setattr(Hosts, "gather", lambda self, name, value: ["of host 0", value])
    if content:
        (tmp_path / TOKEN_FILE).write_text(content)
    with nullcontext() if is_same else pytest.raises(ValueError, match="is not the same directory on this host as on"):
        locked_by_host_0(tmp_path, Hosts(1, 2)).__enter__()


def test_every_version_of_the_settings_is_recorded_with_its_first_step(tmp_path):
    first, second = {"a": {"b": 1}}, {"a": {"b": 2}, "c": (1,)}
    for step, settings in ((0, first), (3, first), (5, second), (6, second)):
        write_settings(settings, tmp_path, step)
        with (tmp_path / "settings.jsonl").open("a") as file:
            file.write('{"after_step": 7, "conf')  # by a killed run
    versions = list(load_jsonl(tmp_path / "settings.jsonl"))
    expected = [(0, first), (5, second | {"c": [1]})]
    assert [(line["after_step"], line["config"]) for line in versions] == expected
    assert json.loads((tmp_path / "config.json").read_text())["config"] == versions[-1]["config"]
    assert changed_settings(second, tmp_path, {}) == {}
    third = {"a": {"b": 2, "d": None}, "e": 3}
    assert changed_settings(third, tmp_path, {}) == {"c": ([1], None), "e": (None, 3)}


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', '{"config": [1]}'])
def test_another_programs_settings_are_no_settings_of_a_run(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert changed_settings({"a": 2}, tmp_path, {}) == {}
    for settings in OF_KIND.values():
        with pytest.raises(ValueError, match=r"has a config.json that is not a run's, perhaps a model's; choose ano"):
            check_kind(settings, tmp_path)


@pytest.mark.parametrize("has_log", [True, False])
@pytest.mark.parametrize(
    ("change", "is_possible"),
    [
        *((f"{key}=o", True) for key in ("model.path", "data.train", "data.validation")),
        *(("seed=1", True), ("model.dtype=float32", True), ("lora.rank=4", False), ("optim.train_vision=true", False)),
    ],
)
def test_another_model_or_data_needs_allow_changes(change, is_possible, has_log, tmp_path):
    """Other trained parameters than in the checkpoints are never possible."""
    write_settings(to_record(load_config(None)), tmp_path)
    if has_log:
        (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    if not has_log or not is_possible:
        (tmp_path / "checkpoints" / "1").mkdir(parents=True)

    async def acquire(allow_changes: bool) -> list[str]:  # in a loop, which handles signals
        with ExitStack() as stack:
            other = to_record(load_config(None, change))
            return [*RunDirectory.acquire(str(tmp_path), stack, other, allow_changes, ALONE).changes]

    advice = "earlier .* --allow" if is_possible else "checkpoints .* run_dir$"
    with pytest.raises(ValueError, match=rf"^{re.escape(change).replace('true', 'True')}, but was \S+ in the {advice}"):
        asyncio.run(acquire(allow_changes=not is_possible))
    if is_possible:
        assert asyncio.run(acquire(allow_changes=True)) == [change.partition("=")[0]]


def test_a_changed_file_of_the_user_is_a_change(tmp_path):
    own, other = tmp_path / "own.py", tmp_path / "new.py"
    settings = to_record(load_config(None, f"reward.plugin={own}:reward"))
    own.write_text("x = 1\n")
    write_settings(settings, tmp_path, **{OWN_CODE: (first := own_sums(settings))})
    assert changed_settings(settings, tmp_path, first) == changed_settings(settings, tmp_path, {}) == {}
    own.write_text("x = 2\n")
    second = own_sums(settings) | {str(other): "a"}
    assert changed_settings(settings, tmp_path, second) == {f"checksum of {own}": (first[str(own)], second[str(own)])}


def test_a_runs_id_is_stable_and_unique(tmp_path):
    name = f"8B, né {'x' * 200}"
    run, namesake, copy = (tmp_path / parent / name for parent in "abc")
    run.mkdir(parents=True)
    namesake.mkdir(parents=True)
    first = run_id(run, ALONE)
    assert first == run_id(run, ALONE)
    shutil.copytree(run, copy)
    ids = {first, run_id(namesake, ALONE), run_id(copy, ALONE)}
    shutil.rmtree(run)
    run.mkdir()
    ids.add(run_id(run, ALONE))
    assert len(ids) == 4 and all(each.startswith("8B__n__x") for each in ids)
    assert Label.of(f"{first}/?{first}") == Label(f"{first}/", asker=first)


@pytest.mark.parametrize(("open_", "schema"), [(open_run, Config), (open_sft_run, SftConfig)])
@async_test
async def test_a_new_run_in_another_runs_directory_is_rejected(open_, schema, tmp_path):
    with locked(tmp_path / "outer") as outer:
        write_settings({}, outer)
    inner = tmp_path / "outer" / "plots" / "inner"
    with pytest.raises(ValueError, match=rf"run_dir={inner} is in the directory of another run, {tmp_path}/outer;"):
        await open_(load_config(None, f"run_dir={inner}", schema=schema)).__aenter__()
    assert not inner.exists()
    inner.mkdir(parents=True)
    write_settings({}, inner)
    check_not_in_a_run(str(inner))  # it resumes


def test_a_directory_with_another_programs_settings_may_contain_runs(tmp_path):
    (tmp_path / "settings.jsonl").touch()
    check_not_in_a_run(str(tmp_path / "run"))
