"""Hosts that were given other code, other data or another model notice it; where those lie makes no difference."""

import os
import shutil
from types import SimpleNamespace

import pytest

from paravt_jax.data.prompts import Prompt
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.run.fingerprints import EVERY_BYTES, check_sources, code_sums, model_sums, sum_of_rows


def test_code_is_that_of_the_program_and_what_a_setting_names(tmp_path):
    own = tmp_path / "own.py"
    settings = {"reward.plugin": f"{own}:reward", "rollout.tools": ["crop_video", f"{own}:look"], "seed": 0}
    own.write_text("x = 1\n")
    before = code_sums(settings)
    assert {"paravt_jax/learner/variants.py", "rollout/episode.py", "model_port/text.py", str(own)} <= set(before)
    own.write_text("x = 2\n")
    after = code_sums(settings)
    assert [name for name in before if before[name] != after[name]] == [str(own)]
    assert str(own) not in code_sums({"loss.name": "gspo"})


@pytest.fixture
def model(tmp_path):
    """A file of three megabytes and some more, and what hf leaves beside a model that it has downloaded."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "model.safetensors").write_bytes(os.urandom(3 * EVERY_BYTES + 100))
    (path / "config.json").write_text("{}")
    return path


@pytest.mark.parametrize("place", [0, 2 * EVERY_BYTES, -1])
def test_a_model_with_another_byte_at_the_beginning_the_middle_or_the_end_is_another(model, place):
    before = model_sums(model, "model.path")
    content = bytearray((model / "model.safetensors").read_bytes())
    content[place] ^= 1
    (model / "model.safetensors").write_bytes(content)
    after = model_sums(model, "model.path")
    assert [name for name in before if before[name] != after[name]] == ["model.safetensors of model.path"]


def test_a_model_with_another_name_of_a_file_is_another_and_what_a_download_leaves_is_none(model, tmp_path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / ".cache" / "huggingface").mkdir(parents=True)
    (other / ".cache" / "huggingface" / "model.metadata").write_text("downloaded at noon")
    assert model_sums(model, "model.path") == model_sums(other, "model.path")
    (other / "config.json").rename(other / "settings.json")
    assert model_sums(model, "model.path") != model_sums(other, "model.path")


def test_a_base_and_its_adapter_are_compared_file_by_file_whatever_their_names(model, tmp_path):
    """Both have a config.json, and neither hides that of the other."""
    adapter = shutil.copytree(model, tmp_path / "adapter")
    policy, told = SimpleNamespace(source=model, adapter=adapter), []
    hosts = SimpleNamespace(check_same=lambda sums, mend: told.append(sums()))
    check_sources(hosts, [], [], policy)
    (model / "config.json").write_text("{ }")
    check_sources(hosts, [], [], policy)
    before, after = told
    assert [name for name in before if before[name] != after[name]] == ["config.json of model.path"]


def prompt(folder):
    return Prompt("id", "<video>\nWhich one?", (str(folder / "a.mp4"),), "A", "mcq", (str(folder / "a.srt"),))


def trace(folder):
    media = Media("video", str(folder / "a.mp4"))
    return Trace("id", (Message("user", (media, "What happens?")),))


@pytest.mark.parametrize("row", [prompt, trace])
def test_rows_are_the_same_wherever_their_files_lie_and_others_with_other_files(row, tmp_path):
    for folder, length in (("here", 10), ("there", 10), ("other", 11)):
        (tmp_path / folder).mkdir()
        for name in ("a.mp4", "a.srt"):
            (tmp_path / folder / name).write_bytes(bytes(length))
    here, there, other = (sum_of_rows([row(tmp_path / folder)]) for folder in ("here", "there", "other"))
    assert here == there != other and here.startswith("1 rows with the sum ")
    assert sum_of_rows([row(tmp_path / "here")] * 2).startswith("2 rows")
