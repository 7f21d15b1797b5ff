"""A run that opens its policy keeps what others put into its directory."""

import shutil
from dataclasses import replace

import pytest

from paravt_jax.config import MeshConfig, PolicyConfig
from paravt_jax.run.policy import HF_FILES_DIR, open_policy
from paravt_jax.run.recipe import Recipe

RECIPE = Recipe(min_pixels=1024, max_pixels=50_176)


def opened(model_path, run_dir, recipe=RECIPE):
    return open_policy(PolicyConfig(path=str(model_path)), MeshConfig(), recipe, seed=0, run_dir=run_dir)


def test_a_model_that_lies_in_the_run_directory_is_read_and_stays(tiny_hf, tmp_path):
    for name in ("hf", "policy", "model"):
        shutil.copytree(tiny_hf, tmp_path / name)
        (tmp_path / name / "notes.txt").write_text("mine")
        opened(tmp_path / name, tmp_path).load()
        assert (tmp_path / name / "model.safetensors").read_bytes() == (tiny_hf / "model.safetensors").read_bytes()
        assert (tmp_path / name / "notes.txt").exists()


def test_what_computes_attention_is_known_before_anything_is_trained(tiny_hf, tmp_path):
    policy = opened(tiny_hf, tmp_path)
    assert policy.attention(4096) == "attention: blocked (cpu, rows of 4096 tokens)"
    assert policy.attention(16_384) == "attention: scanned (cpu, rows of 16384 tokens)"
    kernel = replace(policy, compute=replace(policy.compute, attention="kernel"))
    with pytest.raises(ValueError, match="there is none for cpu"):
        kernel.attention(4096)


def test_a_model_at_the_place_of_our_own_files_is_refused_and_stays(tiny_hf, tmp_path):
    model = shutil.copytree(tiny_hf, tmp_path / HF_FILES_DIR)
    with pytest.raises(ValueError, match=r"lies in .*hf_files, which would be replaced"):
        opened(model, tmp_path)
    with pytest.raises(ValueError, match="was written as tiny and moved here"):
        opened(tiny_hf, tmp_path)
    assert (model / "model.safetensors").exists()


def test_our_own_files_follow_the_settings_and_a_copied_run_may_keep_them(tiny_hf, tmp_path):
    opened(tiny_hf, tmp_path / "run")
    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved", copy_function=shutil.copyfile)  # with other times
    (moved / HF_FILES_DIR / "notes.txt").write_text("mine")
    opened(tiny_hf, moved)
    assert (moved / HF_FILES_DIR / "notes.txt").exists()
    wider = opened(tiny_hf, tmp_path / "run", Recipe(min_pixels=1024, max_pixels=100_352))
    assert "100352" in (wider.hf_files / "preprocessor_config.json").read_text()
