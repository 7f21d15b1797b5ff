"""A conversion is atomic, keeps the source's values, and names tensors and files that it cannot convert."""

import json
import shutil
import signal
from pathlib import Path

import forked
import numpy as np
import pytest
from changed_files import change_tensors
from huggingface_hub import constants

from model_port.checkpoint import StoredParams
from model_port.convert import convert
from model_port.layout import INFO_FILE
from model_port.output_dir import LIST_FILE
from model_port.tiny import make_tiny

MOMENTS = {
    "arrays created": ("model_port.checkpoint", "_create_array", 13),
    "half of the blocks": ("model_port.convert", "read_param", 20),
    "all but the rename": ("model_port.output_dir", "_sync", 1),
    "renamed": ("model_port.output_dir", "delete", 2),
}


def run_and_die(moment: str, number: int, src: Path, dst: Path) -> int:
    arguments = (*MOMENTS[moment], int(number), "--src", src, "--dst", dst)
    return forked.run("dying", *arguments, deadline_s=120).returncode


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_conversion_is_atomic_and_the_next_one_cleans_up(moment, tiny_hf, tmp_path):
    dst = tmp_path / "ckpt"
    assert run_and_die(moment, signal.SIGKILL, tiny_hf, dst) == -signal.SIGKILL
    assert dst.exists() == (moment == "renamed")
    convert(tiny_hf, dst, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert {path.name for path in dst.iterdir()} == {"params", "hf", INFO_FILE, LIST_FILE}


@pytest.mark.slow
def test_a_terminated_conversion_removes_its_files(tiny_hf, tmp_path):
    assert run_and_die("half of the blocks", signal.SIGTERM, tiny_hf, tmp_path / "ckpt") == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversion_keeps_the_dtype_and_records_its_source(dtype, tmp_path):
    make_tiny(tmp_path / "hf", dtype=dtype)
    report = convert(tmp_path / "hf", tmp_path / "ckpt")
    assert {found.name for found in StoredParams(tmp_path / "ckpt").dtypes.values()} == {dtype}
    info = json.loads((tmp_path / "ckpt" / INFO_FILE).read_text())
    source = str(tmp_path / "hf")
    assert info == {"format_version": 1, "dtype": dtype, "num_params": report.num_params, "source": source}
    assert report.num_bytes == np.dtype(dtype).itemsize * report.num_params


@pytest.mark.parametrize(
    ("dtypes", "listed"),
    [
        (
            {"q_norm": "float16"},
            r"float16 \(such as model\.language_model\.layers\.0\.self_attn\.q_norm\.weight\) and "
            r"float32 \(such as model\.visual\.patch_embed\.proj\.weight\)",
        ),
        ({"weight": "float64", "bias": "float64"}, r"float64 \(such as .*\)"),
    ],
    ids=["two dtypes", "unsupported dtype"],
)
def test_a_source_with_an_unsupported_dtype_needs_a_flag(dtypes, listed, tiny_hf, tmp_path):
    shutil.copytree(tiny_hf, tmp_path / "hf")
    change_tensors(
        tmp_path / "hf",
        lambda tensors: tensors.update(
            {name: tensors[name].astype(dtype) for name in tensors for word, dtype in dtypes.items() if word in name}
        ),
    )
    with pytest.raises(ValueError, match=rf"in {listed}; choose float32, bfloat16, float16 with --dtype$"):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    assert convert(tmp_path / "hf", tmp_path / "ckpt", "float32").dtype == "float32"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("params/name", r"a ckpt is a checkpoint already; use it directly, or python -m model_port\.export --src '/"),
        ("adapter_config.json", r"a ckpt is an adapter; use it directly, or .* --src '/.*a ckpt' --dst DIR merges it"),
    ],
)
def test_a_converted_directory_is_reported(file, message, tmp_path):
    (tmp_path / "a ckpt" / file).parent.mkdir(parents=True)
    (tmp_path / "a ckpt" / file).write_text("{}")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "a ckpt", tmp_path / "again")


def test_a_file_of_a_model_is_not_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"hf/model.safetensors is a file; give the directory of the model"):
        convert("hf/model.safetensors", "ckpt")


def test_a_failed_download_has_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        RuntimeError, match=r"is not a directory and could not be downloaded .* run `hf download"
    ) as raised:
        convert("Nobody/nothing", tmp_path / "ckpt")
    assert str(raised.value).endswith("and give --src DIR")
    assert "\n" not in str(raised.value) and not (tmp_path / "ckpt").exists()
    with pytest.raises(ValueError, match="already exists"):  # before any download
        convert("Nobody/nothing", tmp_path)
