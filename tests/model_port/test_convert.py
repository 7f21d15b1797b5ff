"""The destination of a conversion: one writer at a time, recovered after a death, old content kept until the end."""

import json
import shutil
import signal
from pathlib import Path

import forked
import pytest
from changed_files import change_tensors
from huggingface_hub import constants

from model_port.checkpoint import StoredParams
from model_port.convert import convert
from model_port.layout import INFO_FILE, is_checkpoint
from model_port.output_dir import LIST_FILE, output_directory, partial_directory
from model_port.tiny import make_tiny

MOMENTS = {
    "arrays created": ("model_port.checkpoint", "_create_array", 13),
    "half of the blocks": ("model_port.convert", "read_param", 20),
    "all but the rename": ("model_port.output_dir", "_sync", 1),
    "renamed": ("model_port.output_dir", "_remove", 2),
}


def run_and_die(moment: str, number: int, src: Path, dst: Path) -> int:
    arguments = (*MOMENTS[moment], int(number), "--src", src, "--dst", dst)
    return forked.run("dying", *arguments, deadline_s=120).returncode


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_conversion_leaves_all_or_nothing_and_the_next_one_cleans_up(moment, tiny_hf, tmp_path):
    dst = tmp_path / "ckpt"
    assert run_and_die(moment, signal.SIGKILL, tiny_hf, dst) == -signal.SIGKILL
    assert dst.exists() == (moment == "renamed")
    convert(tiny_hf, dst, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]
    assert {path.name for path in dst.iterdir()} == {"params", "hf", INFO_FILE, LIST_FILE}


@pytest.mark.slow
def test_a_politely_killed_conversion_removes_what_it_wrote(tiny_hf, tmp_path):
    assert run_and_die("half of the blocks", signal.SIGTERM, tiny_hf, tmp_path / "ckpt") == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []


def test_a_live_writer_is_left_alone(tiny_hf, tmp_path):
    dst = tmp_path / "ckpt"
    with output_directory(dst) as partial:
        (partial / "mine").touch()
        with pytest.raises(ValueError, match=r"another process is writing .*ckpt"):
            convert(tiny_hf, dst)
        assert (partial / "mine").exists()
    assert {path.name for path in dst.iterdir()} == {"mine", LIST_FILE}


def test_a_death_between_the_two_renames_loses_nothing(tiny_hf, tmp_path):
    dst = tmp_path / "ckpt"
    convert(tiny_hf, dst)
    dst.rename(tmp_path / ".ckpt.replaced")
    partial_directory(dst).mkdir()
    with pytest.raises(ValueError, match="already exists"):
        convert(tiny_hf, dst)
    assert is_checkpoint(dst) and [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_a_failed_forced_conversion_leaves_the_old_one(tiny_hf, tmp_path, monkeypatch):
    dst = tmp_path / "ckpt"
    convert(tiny_hf, dst, "float32")
    monkeypatch.setattr("model_port.convert.read_param", lambda *_: (_ for _ in ()).throw(ValueError("worn out")))
    with pytest.raises(ValueError, match="worn out"):
        convert(tiny_hf, dst, "bfloat16", force=True)
    assert json.loads((dst / INFO_FILE).read_text())["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt"]


def test_the_target_of_a_link_is_replaced_and_the_link_stays(tiny_hf, tmp_path):
    convert(tiny_hf, tmp_path / "disk" / "ckpt", "float32")
    (tmp_path / "ckpt").symlink_to(tmp_path / "disk" / "ckpt")
    convert(tiny_hf, tmp_path / "ckpt", "bfloat16", force=True)
    assert (tmp_path / "ckpt").is_symlink()
    assert json.loads((tmp_path / "disk" / "ckpt" / INFO_FILE).read_text())["dtype"] == "bfloat16"


def test_the_record_says_what_was_converted(tiny_hf, tmp_path):
    report = convert(tiny_hf, tmp_path / "ckpt", "float16")
    info = json.loads((tmp_path / "ckpt" / INFO_FILE).read_text())
    assert info == {"format_version": 1, "dtype": "float16", "num_params": report.num_params, "source": str(tiny_hf)}
    assert report.num_bytes == 2 * report.num_params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nothing_is_cast_unasked(dtype, tmp_path):
    make_tiny(tmp_path / "hf", dtype=dtype)
    assert convert(tmp_path / "hf", tmp_path / "ckpt").dtype == dtype
    assert {found.name for found in StoredParams(tmp_path / "ckpt").dtypes.values()} == {dtype}


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
    ids=["two", "of no checkpoint"],
)
def test_a_source_whose_dtype_cannot_be_kept_asks_for_one(dtypes, listed, tiny_hf, tmp_path):
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


def test_a_download_that_is_impossible_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(
        RuntimeError, match=r"is not a directory and could not be downloaded .* run `hf download"
    ) as raised:
        convert("Nobody/nothing", tmp_path / "ckpt")
    assert str(raised.value).endswith("and give --src DIR")
    assert "\n" not in str(raised.value) and not (tmp_path / "ckpt").exists()
