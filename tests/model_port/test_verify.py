"""The command that shows that transformers computes what we do."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from model_port.safetensors_io import SINGLE_FILE, HfTensors, SafetensorsWriter
from model_port.tiny import make_tiny
from model_port.verify import largest_difference


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    directory = tmp_path_factory.mktemp("verify") / "hf"
    make_tiny(directory)
    return directory


def verify(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "model_port.verify", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_the_same_files_give_the_same_logits(hf):
    done = verify("--hf", str(hf))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["largest_difference"] < 1e-4 < found["largest_logit"]


@pytest.mark.slow
def test_one_changed_weight_is_found(hf, tmp_path):
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
    assert largest_difference(changed, hf)[0] > 1e-2
    done = verify("--hf", str(changed), "--src", str(hf))
    assert done.returncode == 1 and "the two sides differ by" in done.stderr


def test_without_torch_it_says_what_is_missing_and_how_to_get_it_in_one_line(hf, tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("""raise ModuleNotFoundError("No module named 'torch'")""")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = verify("--hf", str(hf))
    assert done.returncode == 1 and done.stdout == ""
    assert "No module named 'torch'" in done.stderr and "bash scripts/setup.sh dev" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_directory_that_is_not_there_is_said(hf):
    done = verify("--hf", f"{hf}/nowhere")
    assert done.returncode == 1 and "nowhere is not a directory" in done.stderr
