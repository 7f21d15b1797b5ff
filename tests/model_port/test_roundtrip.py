"""Hugging Face -> checkpoint -> Hugging Face changes no bit, and failures leave no partial output."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import forked
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from changed_files import change_tensors, edit
from fake_hub import serve_hub
from flax import nnx
from flax.traverse_util import unflatten_dict
from on_use import torch, transformers
from reference import CONFIGS, make_reference, prompts, reference_logits, save_by_orbax, save_reference
from safetensors.numpy import load_file

import model_port
from model_port.convert import convert
from model_port.export import export
from model_port.json_files import flattened
from model_port.loading import abstract_model, abstract_params
from model_port.output_dir import LIST_FILE
from model_port.reference import as_published
from model_port.safetensors_io import INDEX_FILE, safetensors_writer
from model_port.sharding import flat_params, make_mesh
from model_port.tiny import make_tiny, tiny_config
from model_port.weights import module_name


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: value for shard in directory.glob("*.safetensors") for name, value in load_file(shard).items()}


def assert_same_bytes(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert (value.dtype, value.shape) == (second[name].dtype, second[name].shape), name
        assert value.tobytes() == second[name].tobytes(), name


def is_square(tensor: np.ndarray) -> bool:
    """Whether gate and up tensors are square: then transformers uses its module order, not the published order."""
    return tensor.ndim == 3 and tensor.shape[1] == tensor.shape[2]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [*((name, "float32") for name in CONFIGS), ("experts", "bfloat16")])
def test_a_roundtrip_changes_no_bit_and_transformers_agrees(name, dtype, tmp_path):
    reference = make_reference(CONFIGS[name], dtype=dtype)
    before = save_reference(reference, tmp_path / "hf")
    make_tiny(tmp_path / "side", config=tiny_config(CONFIGS[name].family))
    for path in (tmp_path / "side").iterdir():
        if path.name.startswith(("token", "chat", "prepro", "video", "generation")):
            shutil.copy(path, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "ckpt", dtype)
    export(tmp_path / "ckpt", tmp_path / "again", max_shard_gib=50e3 / 2**30)
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 1
    again = tensors_of(tmp_path / "again")
    before = {key: value if is_square(value) else as_published(key, value) for key, value in before.items()}
    by_module = [{module_name(CONFIGS[name], key): value for key, value in side.items()} for side in (again, before)]
    assert_same_bytes(*by_module)
    if dtype == "float32":
        again = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "again").eval()
        inputs = prompts(CONFIGS[name])["mixed"]
        with torch.no_grad():
            np.testing.assert_allclose(reference_logits(again, inputs), reference_logits(reference, inputs), atol=1e-5)


@pytest.fixture(scope="module")
def ckpt(tiny_hf, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "ckpt"
    convert(tiny_hf, path, "float32")
    return path


@pytest.mark.slow
def test_files_and_a_checkpoint_load_on_a_mesh(tiny_hf, ckpt):
    alone = flat_params(model_state(model_port.load(tiny_hf)))
    for source, mesh in ((tiny_hf, jax.make_mesh((8,), ("fsdp",))), (ckpt, make_mesh(fsdp=4, tensor=2))):
        spread = flat_params(model_state(model_port.load(source, mesh=mesh)))
        for path, value in spread.items():
            np.testing.assert_array_equal(value, alone[path], err_msg=path)
        kernel = spread["text.layers.attn.q_kernel_nhd"]
        assert kernel.addressable_shards[0].data.size * 8 == kernel.size


def model_state(model):
    return nnx.state(model, nnx.Param)


def test_paths_with_dots_work(ckpt, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    export(Path("..") / os.path.relpath(ckpt, tmp_path), "../out")
    convert("../out", "../again", "float32")
    assert_same_bytes(*(flat_params(model_state(model_port.load(path))) for path in ("../again", ckpt)))


def test_plain_orbax_restores_it(tiny_hf, ckpt):
    model = model_port.load(tiny_hf)
    abstract = unflatten_dict(abstract_params(abstract_model(model.config), "float32"), sep=".")
    device = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), abstract)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = flattened(checkpointer.restore(ckpt.absolute() / "params", abstract))
    for path, value in flat_params(model_state(model)).items():
        np.testing.assert_array_equal(restored[path], value, err_msg=path)


@pytest.mark.slow
def test_export_takes_what_orbax_saved_from_sharded_arrays(tiny_hf, ckpt, tmp_path):
    model = model_port.load(ckpt, mesh=make_mesh(fsdp=4, tensor=2))
    save_by_orbax(tmp_path / "run", flat_params(model_state(model)))
    shutil.copytree(ckpt / "hf", tmp_path / "run" / "hf")
    export(tmp_path / "run", tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(tiny_hf))


def test_an_export_has_every_file_that_readers_need(tiny_hf, tmp_path):
    convert(tiny_hf, tmp_path / "ckpt", "bfloat16")
    export(tmp_path / "ckpt", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json",
        "video_preprocessor_config.json", "chat_template.jinja", "README.md", "model.safetensors",
    }  # fmt: skip
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {config.get("dtype"), config["text_config"].get("dtype")} == {"bfloat16"}
    bounds = json.loads((tmp_path / "out" / "preprocessor_config.json").read_text())["size"]
    assert bounds == json.loads((tiny_hf / "preprocessor_config.json").read_text())["size"]
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\n")


def rewrite(change):
    return lambda path: change_tensors(path, change)


def with_other_row(table):
    return np.where(np.arange(len(table))[:, None] == 500, table + np.float32(1e-3), table)


HEAD = "model.language_model.norm.weight"
EMBEDDING = "model.language_model.embed_tokens.weight"
UNTIED = r"tie_word_embeddings=true, but lm_head.weight differs from .*embed_tokens.weight"
LFS_POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1234\n"


BAD_SOURCES = {  # how to break a copy of a good directory, and the error
    "missing shard": (
        lambda p: (p / INDEX_FILE).write_text('{"weight_map": {"a": "model.safetensors", "b": "gone.safetensors"}}'),
        "1 of 2 shards are missing: gone.safetensors",
    ),
    "weights not fetched": (
        lambda p: (p / "model.safetensors").write_text(LFS_POINTER),
        "model.safetensors is a Git LFS pointer",
    ),
    "tokenizer not fetched": (
        lambda p: (p / "tokenizer.json").write_text(LFS_POINTER),
        "tokenizer.json is a Git LFS pointer, not the file: run `git lfs pull`",
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"has neither model.safetensors nor .*\(.bin"),
    "missing key": (rewrite(lambda t: t.pop(HEAD)), f"1 missing: {HEAD}"),
    "extra key": (rewrite(lambda t: t.update(extra=np.zeros(3, np.float32))), "1 unknown: extra"),
    "NaN": (rewrite(lambda t: t.update({HEAD: np.full(128, np.nan, np.float32)})), f"tensor {HEAD} of .* are NaN or"),
    "tied to another head": (rewrite(lambda t: t.update({"lm_head.weight": with_other_row(t[EMBEDDING])})), UNTIED),
    "tied to a smaller head": (rewrite(lambda t: t.update({"lm_head.weight": t[EMBEDDING][:-1].copy()})), UNTIED),
    "wrong shape": (rewrite(lambda t: t.update({HEAD: np.zeros(7, np.float32)})), r"norm.weight \(7,\), not \(128,\)"),
    "no directory": (shutil.rmtree, "is neither a directory nor a hub id"),
}


@pytest.mark.parametrize("kind", BAD_SOURCES)
def test_a_bad_source_is_one_error_and_nothing_is_written(kind, tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr("model_port.weights.READ_BLOCK_BYTES", 2**16)  # compares a tied head in several blocks
    spoil, message = BAD_SOURCES[kind]
    shutil.copytree(tiny_hf, tmp_path / "hf")
    spoil(tmp_path / "hf")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "hf", tmp_path / "ckpt")
    assert {path.name for path in tmp_path.iterdir()} <= {"hf"}


def test_a_conversion_without_a_tokenizer_warns(tiny_hf, tmp_path, capsys):
    shutil.copytree(tiny_hf, tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    report = convert(tmp_path / "hf", tmp_path / "ckpt")
    assert f"{tmp_path / 'hf'} has no tokenizer (tokenizer.json or vocab.json)" in capsys.readouterr().err
    assert "1.04 million parameters in float32, 4.1 MB in " in str(report)


@pytest.mark.parametrize(
    "head",
    [
        lambda tensors: tensors[EMBEDDING],
        lambda tensors: tensors[EMBEDDING].astype("float64"),
        lambda tensors: tensors.pop(EMBEDDING),
    ],
    ids=["with the embedding", "in another dtype", "without the embedding"],
)
def test_a_tied_head_may_be_stored_with_or_without_an_equal_embedding(head, tiny_hf, tmp_path, monkeypatch):
    monkeypatch.setattr("model_port.weights.READ_BLOCK_BYTES", 2**16)
    hf = shutil.copytree(tiny_hf, tmp_path / "hf")
    change_tensors(hf, lambda tensors: tensors.update({"lm_head.weight": head(tensors)}))
    model_port.load(hf)
    convert(hf, tmp_path / "ckpt")
    export(tmp_path / "ckpt", tmp_path / "again")
    assert_same_bytes(tensors_of(tmp_path / "again"), tensors_of(tiny_hf))


def make_non_finite(ckpt: Path) -> None:
    chunk = next((ckpt / "params" / "text.final_norm.scale").glob("[0-9]*"))
    chunk.write_bytes(np.full(128, np.nan, np.float32).tobytes())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (make_non_finite, r"text\.final_norm\.scale of .*params has values that are NaN or infinite"),
        (
            lambda ckpt: edit(ckpt / "hf" / "config.json", {"text_config.intermediate_size": 192}),
            r"the shapes of 3 parameters do not match .*config\.json: \S+\.down_kernel_df \(4, 128, 256\), not",
        ),
    ],
    ids=["not finite", "other shapes"],
)
def test_a_damaged_checkpoint_is_neither_loaded_nor_exported(spoil, message, tiny_hf, tmp_path):
    convert(tiny_hf, tmp_path / "ckpt")
    spoil(tmp_path / "ckpt")
    for read in (model_port.load, lambda path: export(path, tmp_path / "again")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / "ckpt")


def test_a_full_disk_is_detected_before_writing(tiny_hf, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ValueError, match=r"has 1.0 kB free, but \d\.\d MB are needed; "):
        convert(tiny_hf, tmp_path / "ckpt")
    assert list(tmp_path.iterdir()) == []


def command(module: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    if not environment:
        return forked.run(f"model_port.{module}", *arguments)
    command = [sys.executable, "-m", f"model_port.{module}", *map(str, arguments)]  # parts are read at the first import
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


@pytest.mark.slow
def test_commands_fail_with_one_line_and_succeed_with_a_summary(tiny_hf, tmp_path):
    run = command("convert", "--src", tmp_path / "absent", "--dst", tmp_path / "ckpt")
    assert run.returncode == 1 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    run = command("convert", "--src", tiny_hf, "--dst", tmp_path / "ckpt", "--dtype", "float32")
    assert (run.returncode, run.stderr) == (0, "") and "1.04 million parameters in float32" in run.stdout
    run = command("convert", "--src", tiny_hf, "--dst", tmp_path / "ckpt", "--dtype", "bfloat16", "--force")
    assert run.returncode == 0 and "parameters in bfloat16" in run.stdout
    options = ("--dtype", "float32", "--max-shard-gib", "0.001", "--force")
    for more, num_files in (((), 1), (options, 5)):
        run = command("export", "--src", tmp_path / "ckpt", "--dst", tmp_path / "out", *more)
        assert run.returncode == 0 and f"in {'float32' if more else 'bfloat16'}" in run.stdout
        assert len(list((tmp_path / "out").glob("*.safetensors"))) == num_files
    rejected = {("--evaluation", tmp_path): "has no eval.json", ("--adapter", "--dtype", "x"): "dtype 'x'"}
    for more, message in rejected.items():
        run = command("export", "--src", tmp_path / "ckpt", "--dst", tmp_path / "out", "--force", *more)
        assert run.returncode == 1 and message in run.stderr


@pytest.mark.slow
def test_export_pushes_its_files_and_fails_early_without_a_token(tiny_hf, tmp_path):
    convert(tiny_hf, tmp_path / "ckpt")
    arguments = ("--src", tmp_path / "ckpt", "--dst", tmp_path / "out", "--push-to-hub", "ada/policy")
    with serve_hub() as hub:
        environment = hub.environment(tmp_path / "home")
        run = command("export", *arguments, **environment | {"HF_TOKEN": ""})
        assert run.returncode == 1 and "token" in run.stderr and run.stderr.count("\n") == 1
        assert not (tmp_path / "out").exists()
        run = command("export", *arguments, **environment)
        assert (run.returncode, run.stderr) == (0, "")  # no progress bar where stderr is not a terminal
        pushed = hub.files("ada/policy")
        again = command("push", tmp_path / "out", "ada/policy", "--revision", "v2", "--message", "Again", **environment)
        assert again.returncode == 0 and f"{hub.url}/ada/policy" in again.stdout, again.stderr
        assert hub.files("ada/policy", "v2") == pushed
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != LIST_FILE}
    assert {name: pushed[name] for name in written} == written and f"{hub.url}/ada/policy" in run.stdout


def test_the_safetensors_package_reads_our_files(tmp_path):
    random = np.random.default_rng(0)
    tensors = {
        "a": random.standard_normal((5, 7)).astype(ml_dtypes.bfloat16),
        "b": random.standard_normal((3, 2, 11)).astype(np.float16),
        "c": np.array(2.5, np.float32),
    }
    with safetensors_writer(tmp_path / "x.safetensors", {k: (v.dtype, v.shape) for k, v in tensors.items()}) as write:
        for value in tensors.values():
            for block in np.array_split(value, 2) if value.ndim else [value]:
                write(block)
    assert_same_bytes(load_file(tmp_path / "x.safetensors"), tensors)


def test_writing_less_or_more_than_declared_is_an_error(tmp_path):
    declared = {"a": (np.dtype(np.float32), (3,))}
    for num_values in (2, 4):
        expected = f"{4 * num_values} bytes of tensors were written, but the header declares 12"
        with pytest.raises(RuntimeError, match=expected), safetensors_writer(tmp_path / "x", declared) as write:
            write(np.zeros(num_values, np.float32))
