"""Opening a run's policy: its files, attention and adapters."""

import shutil
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import model_port
from model_port.adapters import new_adapter, write_adapter
from model_port.attention import blocked_attention
from model_port.attention.check import check_kernel
from model_port.config import LoraConfig
from model_port.sharding import flat_params
from paravt_jax.config import MeshConfig, PolicyConfig
from paravt_jax.run import policy as policy_module
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.policy import HF_FILES_DIR, open_policy, with_checked_kernel
from paravt_jax.run.recipe import Recipe

RECIPE = Recipe(max_pixels=50_176)


def open_tiny(model_path, run_dir, recipe=RECIPE, lora=None, seed=0, **model):
    settings = PolicyConfig(path=str(model_path), **model)
    return open_policy(settings, MeshConfig(), recipe, lora, seed=seed, run_dir=run_dir)


def test_a_policy_has_the_settings_of_its_run(tiny_hf, tmp_path, monkeypatch):
    auto, dots = (open_tiny(tiny_hf, tmp_path, remat=remat) for remat in ("auto", "dots"))
    assert (auto.compute.remat, dots.compute.remat) == ("full", "dots")
    weights = [open_tiny("tiny", tmp_path / f"{seed}", seed=seed).source / "model.safetensors" for seed in (0, 1)]
    assert weights[0].read_bytes() != weights[1].read_bytes()
    shutil.copytree(tiny_hf, tmp_path / "runs" / "mine")
    monkeypatch.chdir(tmp_path)
    assert open_tiny("runs/mine", tmp_path).name == str(tmp_path / "runs" / "mine")  # could be an id of the hub
    monkeypatch.setattr(policy_module, "source_directory", lambda path, argument: tiny_hf)
    assert open_tiny("runs/other", tmp_path).name == "runs/other"


def test_a_model_in_the_run_directory_is_not_changed(tiny_hf, tmp_path):
    for name in ("hf", "policy", "model"):
        shutil.copytree(tiny_hf, tmp_path / name)
        (tmp_path / name / "notes.txt").write_text("mine")
        open_tiny(tmp_path / name, tmp_path).load()
        assert (tmp_path / name / "model.safetensors").read_bytes() == (tiny_hf / "model.safetensors").read_bytes()
        assert (tmp_path / name / "notes.txt").exists()


def test_a_model_without_a_tokenizer_is_named_before_its_files_are_copied(tiny_hf, tmp_path):
    model = shutil.copytree(tiny_hf, tmp_path / "model")
    (model / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=rf"^{model} has no tokenizer\.json"):
        open_tiny(model, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_attention_line_names_the_form_for_the_row_length(tiny_hf, tmp_path):
    policy = open_tiny(tiny_hf, tmp_path)
    assert policy.attention(4096) == "attention: blocked (cpu, rows of 4096 tokens)"
    assert policy.attention(16_384) == "attention: scanned (cpu, rows of 16384 tokens)"
    kernel = replace(policy, compute=replace(policy.compute, attention="kernel"))
    with pytest.raises(ValueError, match="there is no kernel for cpu"):
        kernel.attention(4096)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("works", "elsewhere", "line"),
    [
        (True, True, "kernel, max error 0"),
        (False, True, "scanned, because the kernel is wrong: max error "),
        (True, False, "scanned, because the kernel failed (on another host)"),
    ],
)
def test_auto_uses_the_kernel_only_if_it_passes_its_check(tiny_hf, tmp_path, monkeypatch, works, elsewhere, line):
    def kernel(q, k, v, layout, causal):
        branches = layout.branch_ids if works else 0 * layout.branch_ids  # broken: branches see each other
        return blocked_attention(q, k, v, layout._replace(branch_ids=branches), causal)

    def check(kernel, *arguments):
        assert [heads.causal for heads in arguments[:2]] == [True, False]  # text, vision
        return replace(check_kernel(kernel, *arguments, num_tokens=96), kernel_ms=1.0, plain_ms=2.0)

    for name, value in {"platform": lambda: "gpu", "kernel_of": lambda _: kernel, "check_kernel": check}.items():
        monkeypatch.setattr(policy_module, name, value)
    monkeypatch.setattr(Hosts, "gather", lambda self, name, passed: [passed, elsewhere])
    policy = with_checked_kernel(open_tiny(tiny_hf, tmp_path))
    assert policy.compute.attention == ("auto_kernel" if works and elsewhere else "auto")
    assert policy.attention(4096).startswith(f"attention: {line}")
    assert policy.attention(1024) == "attention: blocked (gpu, rows of 1024 tokens)"
    named = open_tiny(tiny_hf, tmp_path, attention="scanned")
    assert with_checked_kernel(named) is named


def test_a_model_in_the_directory_of_our_files_is_rejected(tiny_hf, tmp_path):
    model = shutil.copytree(tiny_hf, tmp_path / HF_FILES_DIR)
    with pytest.raises(ValueError, match=r"is in .*hf_files, which would be replaced"):
        open_tiny(model, tmp_path)
    with pytest.raises(ValueError, match="was written as tiny and moved here"):
        open_tiny(tiny_hf, tmp_path)
    assert (model / "model.safetensors").exists()


def test_our_files_follow_the_settings_and_a_copied_run_keeps_them(tiny_hf, tmp_path):
    open_tiny(tiny_hf, tmp_path / "run")
    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved", copy_function=shutil.copyfile)  # with new times
    (moved / HF_FILES_DIR / "notes.txt").write_text("mine")
    open_tiny(tiny_hf, moved)
    assert (moved / HF_FILES_DIR / "notes.txt").exists()
    wider = open_tiny(tiny_hf, tmp_path / "run", Recipe(max_pixels=100_352))
    assert "100352" in (wider.hf_files / "preprocessor_config.json").read_text()


@pytest.mark.slow
def test_an_adapter_is_float32_and_its_base_has_the_activations_dtype(tiny_hf, tmp_path):
    lora = LoraConfig(rank=3, alpha=6.0)
    policy = open_tiny(tiny_hf, tmp_path, lora=lora)
    model = policy.load()
    assert model.compute == policy.compute
    dtypes = {path: leaf.dtype for path, leaf in flat_params(nnx.state(model, nnx.Param)).items()}
    assert {dtype for path, dtype in dtypes.items() if "_lora." in path} == {jnp.dtype("float32")}
    assert {dtype for path, dtype in dtypes.items() if "_lora." not in path} == {jnp.dtype("bfloat16")}
    again, other = (open_tiny(tiny_hf, tmp_path, lora=lora, seed=seed).load() for seed in (0, 1))
    info = policy.adapter_info(model)
    assert info.base.name == str(tiny_hf) and info == policy.adapter_info(again)
    first, second, third = (flat_params(nnx.state(each, nnx.LoRAParam)) for each in (model, again, other))
    assert all(np.array_equal(value, second[path]) for path, value in first.items())
    assert any(not np.array_equal(value, third[path]) for path, value in first.items())


@pytest.mark.slow
def test_a_frozen_model_has_the_activations_dtype_and_a_trained_one_float32(tiny_hf, tmp_path):
    policy = open_tiny(tiny_hf, tmp_path)
    for is_frozen, dtype in ((True, "bfloat16"), (False, "float32")):
        params = flat_params(nnx.state(model := policy.load(is_frozen=is_frozen), nnx.Param))
        assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(dtype)} and policy.adapter_info(model) is None


@pytest.mark.slow
def test_training_resumes_an_adapter_only_with_its_own_settings(tiny_hf, tmp_path):
    lora, config = LoraConfig(rank=3, alpha=6.0), model_port.load(tiny_hf).config
    policy, params = open_tiny(tiny_hf, tmp_path, lora=lora), new_adapter(config, lora, seed=5)
    (path := tmp_path / "adapter").mkdir()
    write_adapter(path, config, policy.adapter_info(policy.load()), params)
    trained = flat_params(nnx.state(open_tiny(path, tmp_path, lora=lora).load(), nnx.LoRAParam))
    assert all(np.array_equal(trained[name], value) for name, value in params.items())
    assert open_tiny(path, tmp_path).load().lora == lora  # as an evaluation opens it
    for other in (LoraConfig(), LoraConfig(rank=3)):
        with pytest.raises(ValueError, match=r"has rank 3 and alpha 6, .*set lora\.rank=3 lora\.alpha=6"):
            open_tiny(path, tmp_path, lora=other)
