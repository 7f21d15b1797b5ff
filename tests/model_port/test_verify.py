"""The command that shows that transformers computes what we do."""

import json
import subprocess
import sys

import numpy as np
import pytest

from model_port.safetensors_io import SINGLE_FILE, HfTensors, SafetensorsWriter
from model_port.tiny import make_tiny
from model_port.verify import main


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "hf"
    make_tiny(directory)
    return directory


@pytest.fixture
def verify(monkeypatch):
    """The command, in this process, which has imported torch already."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["verify", *arguments])
        main()

    return run


@pytest.mark.slow
def test_the_same_files_give_the_same_logits(hf):
    command = [sys.executable, "-m", "model_port.verify", "--hf", str(hf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["largest_difference"] < 1e-4 < found["largest_logit"]


@pytest.mark.slow
def test_one_changed_weight_is_found(hf, verify, tmp_path, capsys):
    changed = tmp_path / "changed"
    make_tiny(changed)
    with HfTensors(hf) as tensors:
        arrays = {name: np.array(tensors.read(name)) for name in tensors.shapes}
    name = "model.language_model.layers.1.mlp.down_proj.weight"
    arrays[name][0] += 1.0
    shapes = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    with SafetensorsWriter(changed / SINGLE_FILE, shapes) as writer:
        for array in arrays.values():
            writer.write(array)
    with pytest.raises(RuntimeError, match="the two sides differ by"):
        verify("--hf", str(changed), "--src", str(hf))
    assert json.loads(capsys.readouterr().out)["largest_difference"] > 1e-2


def test_without_torch_it_says_what_is_missing_and_how_to_get_it_in_one_line(hf, verify, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(RuntimeError, match=r"^the comparison needs torch .* run `bash scripts/setup.sh dev`, .*$"):
        verify("--hf", str(hf))


def test_a_directory_that_is_not_there_is_said(hf, verify):
    with pytest.raises((ValueError, OSError), match="nowhere is not a directory"):
        verify("--hf", f"{hf}/nowhere")
