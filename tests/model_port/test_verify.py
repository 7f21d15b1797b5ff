"""The command that verifies our model against transformers."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
import pytest
from changed_files import change_tensors
from on_use import transformers

from model_port import verify
from model_port.safetensors_io import SINGLE_FILE
from model_port.tiny import make_tiny, tiny_config
from model_port.verify import MAX_RELATIVE, TIMES_THEIRS, LogitsDifference, main, our_logits, their_logits, video_prompt

NUM_LAYERS = 28  # as in the 2B
WIDER = 30  # factor that makes the logits at least as wide as a trained model's


def with_weights(source: Path, dst: Path, change) -> Path:
    change_tensors(shutil.copytree(source, dst), change)
    return dst


def change_a_layer(arrays) -> None:
    name = "model.language_model.layers.{}.mlp.down_proj.weight"
    arrays[name.format(14)] = arrays[name.format(15)]


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify")
    config = tiny_config()
    make_tiny(directory / "hf", config=replace(config, text=replace(config.text, num_layers=NUM_LAYERS)))
    norm = "model.language_model.norm.weight"
    return with_weights(directory / "hf", directory / "wide", lambda each: each.update({norm: WIDER * each[norm]}))


@pytest.fixture(scope="module")
def prompt(hf):
    return video_prompt(hf)


@pytest.fixture(scope="module")
def expected(hf, prompt):
    return their_logits(hf, prompt, "float32")


@pytest.fixture(scope="module")
def allowed_bf16(hf, prompt, expected):
    return TIMES_THEIRS * LogitsDifference.between(their_logits(hf, prompt, "bfloat16"), expected).relative_error


def test_the_prompt_has_frames_with_times_and_a_detail_of_another_size(tiny_hf):
    prompt = video_prompt(tiny_hf)
    assert len(prompt.grids) == 7 and len(np.unique(prompt.grids, axis=0)) == 2
    frames = np.split(prompt.pixels, np.cumsum(prompt.grids.prod(axis=1))[:-1])
    assert all(np.abs(one - other).max() > 0.1 for one, other in pairwise(frames[:-1]))
    text = transformers.AutoTokenizer.from_pretrained(tiny_hf).decode(prompt.ids)
    assert "<0.0 seconds>" in text and "<5.0 seconds>" in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_a_correct_model_with_wide_logits_passes_where_an_absolute_bound_fails(hf, prompt, expected, allowed_bf16):
    ours = our_logits(hf, prompt, "float32")
    found = LogitsDifference.between(ours, expected)
    assert np.abs(ours - expected).max() > 1e-4
    assert found.relative_error < MAX_RELATIVE / 10 and found.top1_agreement == 1 and found.kl < 1e-7
    rounded = LogitsDifference.between(our_logits(hf, prompt, "bfloat16"), expected)
    assert MAX_RELATIVE < rounded.relative_error <= allowed_bf16


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["layer", "order"])
def test_a_wrong_model_fails_in_both_dtypes(wrong, hf, prompt, expected, allowed_bf16, tmp_path):
    src, shown = hf, prompt
    if wrong == "order":
        half, rest = prompt.grids[:2].prod(axis=1)
        swapped = (prompt.pixels[half : half + rest], prompt.pixels[:half], prompt.pixels[half + rest :])
        shown = replace(prompt, pixels=np.concatenate(swapped))
    else:
        src = with_weights(hf, tmp_path / "wrong", change_a_layer)
    for dtype, bound in (("float32", MAX_RELATIVE), ("bfloat16", allowed_bf16)):
        found = LogitsDifference.between(our_logits(src, shown, dtype), expected)
        assert found.relative_error > bound, (wrong, dtype, found)


def test_the_relative_difference_by_hand():
    expected = np.array([[1.0, -1.0], [2.0, -2.0]])
    other = np.array([[1.0, -1.0], [-2.0, 2.0]])
    found = LogitsDifference.between(other, expected)
    # errors 0, 0, 4, 4; expected logits 1, -1, 2, -2 about their means 0
    assert found.relative_error == pytest.approx(np.sqrt(32 / 10)) and found.top1_agreement == 0.5
    likely, rest = 1 / (1 + np.exp(-4)), 1 / (1 + np.exp(4))
    assert found.kl == pytest.approx((likely - rest) * 4 / 2)


@pytest.fixture
def command(monkeypatch):
    """Runs the command in this process, which has already imported torch."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["verify", *arguments])
        main()

    return run


@pytest.mark.slow
def test_only_one_model_is_in_memory_at_a_time(hf, command, monkeypatch):
    def num_bytes():
        return sum(array.nbytes for array in jax.live_arrays())

    before, beside = num_bytes(), []
    monkeypatch.setattr(
        verify, "their_logits", lambda *given: (beside.append(num_bytes() - before), their_logits(*given))[1]
    )
    command("--hf", str(hf))
    assert beside and beside[0] < (hf / SINGLE_FILE).stat().st_size / 100


@pytest.mark.slow
def test_the_verdict_is_one_line(hf, command, tmp_path, capsys):
    command("--hf", str(hf), "--dtype", "bfloat16")
    output = capsys.readouterr()
    report = json.loads(output.out)
    assert report["relative_error"] <= report["bound"] == TIMES_THEIRS * report["transformers"]["relative_error"]
    assert report["top1_agreement"] > 0.9 and report["kl"] > 0 and report["pictures"] == 7
    assert output.err.startswith("THE SAME in bfloat16: relative error ") and output.err.count("\n") == 1
    wrong = with_weights(hf, tmp_path / "wrong", change_a_layer)
    with pytest.raises(RuntimeError, match=r"^DIFFERENT in float32: relative error .*; .* with --dtype bfloat16$"):
        command("--hf", str(wrong), "--src", str(hf))


def without_torch(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    return model


def without_tokenizer(model, monkeypatch):
    (model / "tokenizer.json").unlink()
    return model


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (without_torch, r"^the comparison needs torch .* `bash scripts/setup.sh dev` in a clone$"),
        (without_tokenizer, r"^.*/model has no tokenizer \(tokenizer\.json or vocab\.json\)"),
        (lambda model, _: model / "nowhere", "nowhere is neither a directory nor a hub id"),
        (lambda model, _: model.parent, "has no config.json, so it is not a Hugging Face model directory"),
    ],
)
def test_a_missing_dependency_is_a_one_line_error(given, problem, tiny_hf, command, monkeypatch, tmp_path):
    model = given(shutil.copytree(tiny_hf, tmp_path / "model"), monkeypatch)
    with pytest.raises((ValueError, RuntimeError), match=problem):
        command("--hf", str(model))
