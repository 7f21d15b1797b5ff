"""Checksums detect different code, data or models, wherever the files are."""

import os
import shutil
from types import SimpleNamespace

import pytest

from paravt_jax.data.prompts import Prompt
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.run.fingerprints import EVERY_BYTES, check_sources, code_sums, model_sums, sum_of_rows


def test_code_sums_include_our_sources_and_users_files(tmp_path):
    own = tmp_path / "own.py"
    settings = {"reward.plugin": f"{own}:reward", "rollout.tools": ["crop_video", f"{own}:look"], "seed": 0}
    own.write_text("x = 1\n")
    first = code_sums(settings)
    assert {"paravt_jax/learner/variants.py", "rollout/episode.py", "model_port/text.py", str(own)} <= set(first)
    own.write_text("x = 2\n")
    second = code_sums(settings)
    assert [name for name in first if first[name] != second[name]] == [str(own)]
    assert str(own) not in code_sums({"loss.name": "gspo"})


@pytest.fixture
def model(tmp_path):
    """A model with a file of a bit more than three megabytes."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(os.urandom(3 * EVERY_BYTES + 100))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("offset", [0, 2 * EVERY_BYTES, -1])
def test_a_changed_byte_at_the_start_middle_or_end_changes_the_sum(model, offset):
    first = model_sums(model, "model.path")
    content = bytearray((model / "model.safetensors").read_bytes())
    content[offset] ^= 1
    (model / "model.safetensors").write_bytes(content)
    second = model_sums(model, "model.path")
    assert [name for name in first if first[name] != second[name]] == ["model.safetensors of model.path"]


def test_file_names_count_and_files_of_downloads_do_not(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / ".cache" / "huggingface").mkdir(parents=True)
    (other / ".cache" / "huggingface" / "model.metadata").write_text("downloaded at noon")
    assert model_sums(model, "model.path") == model_sums(other, "model.path")
    (other / "config.json").rename(other / "settings.json")
    assert model_sums(model, "model.path") != model_sums(other, "model.path")


def test_files_of_a_base_and_its_adapter_have_separate_names(model, tmp_path):
    """Both have a config.json."""
    adapter = shutil.copytree(model, tmp_path / "adapter")
    policy, sums = SimpleNamespace(source=model, adapter=adapter), []
    hosts = SimpleNamespace(check_same=lambda values, fix: sums.append(values()))
    check_sources(hosts, [], [], policy)
    (model / "config.json").write_text("{ }")
    check_sources(hosts, [], [], policy)
    first, second = sums
    assert [name for name in first if first[name] != second[name]] == ["config.json of model.path"]


def prompt(folder):
    return Prompt("id", "<video>\nWhich one?", (str(folder / "a.mp4"),), "A", "mcq", (str(folder / "a.srt"),))


def trace(folder):
    media = Media("video", str(folder / "a.mp4"))
    return Trace("id", (Message("user", (media, "What happens?")),))


@pytest.mark.parametrize("row", [prompt, trace])
def test_sums_of_rows_depend_on_files_and_not_on_directories(row, tmp_path):
    for folder, length in (("a", 10), ("b", 10), ("c", 11)):
        (tmp_path / folder).mkdir()
        for name in ("a.mp4", "a.srt"):
            (tmp_path / folder / name).write_bytes(bytes(length))
    first, same, different = (sum_of_rows([row(tmp_path / folder)]) for folder in "abc")
    assert first == same != different and first.startswith("1 rows with checksum ")
    assert sum_of_rows([row(tmp_path / "a")] * 2).startswith("2 rows")
