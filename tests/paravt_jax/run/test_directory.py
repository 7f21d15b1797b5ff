"""A run directory's settings, commit and id."""

import json
import shutil
import subprocess
from pathlib import Path

from paravt_jax.run import directory as module
from paravt_jax.run.directory import _commit, changed_settings, run_id, write_settings
from paravt_jax.run.hosts import ALONE
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
    assert _commit(file) == git(tmp_path, "rev-parse", "HEAD")
    assert _commit(Path("/") / file.name) is None


def test_without_git_there_is_no_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _commit(Path(module.__file__)) is None


def test_every_version_of_the_settings_is_recorded_with_its_first_step(tmp_path):
    for step, settings in ((0, {"a": {"b": 1}}), (3, {"a": {"b": 1}}), (5, {"a": {"b": 2}, "c": [1]})):
        write_settings(settings, tmp_path, step)
    versions = [json.loads(line) for line in (tmp_path / "settings.jsonl").read_text().splitlines()]
    assert [(line["after_step"], line["config"]) for line in versions] == [
        (0, {"a": {"b": 1}}),
        (5, {"a": {"b": 2}, "c": [1]}),
    ]
    assert json.loads((tmp_path / "config.json").read_text())["config"] == versions[-1]["config"]
    assert changed_settings({"a": {"b": 2, "d": None}}, tmp_path) == {"c": ([1], None)}


def test_a_runs_id_is_stable_and_unique(tmp_path):
    run, namesake = tmp_path / "a" / "8B, first", tmp_path / "b" / "8B, first"
    run.mkdir(parents=True)
    namesake.mkdir(parents=True)
    first = run_id(run, ALONE)
    assert first == run_id(run, ALONE)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert len({first, run_id(namesake, ALONE), run_id(copy, ALONE)}) == 3
    assert first.startswith("8B__first-") and Label.of(f"{first}/3") == Label(f"{first}/", 3)
