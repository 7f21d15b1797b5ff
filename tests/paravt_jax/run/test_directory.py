"""What a run's directory says of how it was started."""

import json
import shutil
import subprocess
from pathlib import Path

from paravt_jax.run import directory as module
from paravt_jax.run.directory import _commit, changed_settings, run_id, write_settings
from paravt_jax.run.hosts import ALONE
from rollout.engine.labels import Label


def git(place: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *identity, *arguments], cwd=place, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_only_the_repository_that_the_code_belongs_to_is_recorded(tmp_path):
    git(tmp_path, "init", "-q")
    file = Path(shutil.copy(module.__file__, tmp_path))
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    assert _commit(file) is None  # it lies in another project's repository, as an environment does
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "ours")
    assert _commit(file) == git(tmp_path, "rev-parse", "HEAD")
    assert _commit(Path("/") / file.name) is None


def test_without_git_no_commit_is_known(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _commit(Path(module.__file__)) is None


def test_every_version_of_the_settings_is_kept_with_the_step_where_it_began(tmp_path):
    for step, settings in ((0, {"a": {"b": 1}}), (3, {"a": {"b": 1}}), (5, {"a": {"b": 2}, "c": [1]})):
        write_settings(settings, tmp_path, step)
    kept = [json.loads(line) for line in (tmp_path / "settings.jsonl").read_text().splitlines()]
    assert [(line["after_step"], line["config"]) for line in kept] == [
        (0, {"a": {"b": 1}}),
        (5, {"a": {"b": 2}, "c": [1]}),
    ]
    assert json.loads((tmp_path / "config.json").read_text())["config"] == kept[-1]["config"]
    assert changed_settings({"a": {"b": 2, "d": None}}, tmp_path) == {"c": ([1], None)}


def test_a_run_has_one_id_for_good_and_shares_it_with_neither_a_copy_nor_a_namesake(tmp_path):
    run, namesake = tmp_path / "a" / "8B, first", tmp_path / "b" / "8B, first"
    run.mkdir(parents=True)
    namesake.mkdir(parents=True)
    first = run_id(run, ALONE)
    assert first == run_id(run, ALONE)
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    assert len({first, run_id(namesake, ALONE), run_id(copy, ALONE)}) == 3
    assert first.startswith("8B__first-") and Label.of(f"{first}/3") == Label(f"{first}/", 3)
