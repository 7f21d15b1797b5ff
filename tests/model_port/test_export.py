"""An export's shards and index, both processor formats, chat template and model card."""

import json
import math
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from changed_files import edit
from huggingface_hub import ModelCard
from on_use import transformers
from reference import save_by_orbax
from safetensors.numpy import load_file

from model_port.checkpoint import restore_params
from model_port.convert import convert
from model_port.export import export, main, plan_shards
from model_port.hf_files import base_model, read_side_files
from model_port.loading import abstract_model, abstract_params
from model_port.tiny import make_tiny, tiny_config

HUB_ID = "Qwen/Qwen3-VL-2B-Instruct"
PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A model laid out like the hub's cache, whose files are links."""
    folder = tmp_path_factory.mktemp("cache")
    make_tiny(folder / "blobs")
    snapshot = folder / "models--Qwen--Qwen3-VL-2B-Instruct" / "snapshots" / "0a1b"
    snapshot.mkdir(parents=True)
    for file in (folder / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    return snapshot


@pytest.fixture(scope="module")
def ckpt(source, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("converted") / "ckpt"
    convert(source, path, "bfloat16")
    return path


def test_shards_respect_the_size_limit_and_the_index_locates_each_tensor(ckpt, tmp_path):
    max_bytes = 300_000
    report = export(ckpt, tmp_path / "out", max_shard_gib=max_bytes / 2**30)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(shards) > 3 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    found = {name: shard for shard in shards for name in load_file(tmp_path / "out" / shard)}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == report.num_bytes == 2 * report.num_params
    for shard in shards:
        tensors = load_file(tmp_path / "out" / shard)
        assert len(tensors) == 1 or sum(value.nbytes for value in tensors.values()) <= max_bytes


def test_without_a_limit_there_is_one_file(ckpt, tmp_path):
    export(ckpt, tmp_path / "out", max_shard_gib=math.inf)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_a_tensor_larger_than_a_shard_gets_its_own_shard_and_others_fill_theirs():
    shards = plan_shards({"a": (3,), "b": (11,), "c": (2,), "d": (1,)}, np.dtype(np.float32), 12)
    assert [list(shard.shapes) for shard in shards] == [["a"], ["b"], ["c", "d"]]
    assert [shard.num_bytes for shard in shards] == [12, 44, 12]


@pytest.mark.slow
def test_a_trained_float32_checkpoint_is_cast_and_its_card_has_the_step(ckpt, tmp_path):
    params = restore_params(ckpt, abstract_params(abstract_model(tiny_config()), "float32"))
    trained = {path: value * 1.001 for path, value in params.items()}
    save_by_orbax(tmp_path / "checkpoints" / "7", trained)
    shutil.copytree(ckpt / "hf", tmp_path / "checkpoints" / "7" / "hf")
    for dtype, storage in ((None, np.float32), ("bfloat16", ml_dtypes.bfloat16)):
        out = tmp_path / str(dtype)
        export(tmp_path / "checkpoints" / "7", out, dtype)
        table = load_file(out / "model.safetensors")["model.language_model.embed_tokens.weight"]
        np.testing.assert_array_equal(table, np.asarray(trained["text.embed.table_vd"]).astype(storage))
        config = json.loads((out / "config.json").read_text())
        assert config["dtype"] == config["text_config"]["dtype"] == np.dtype(storage).name
        assert "step 7 of a training run" in (out / "README.md").read_text()


def test_the_card_is_valid_and_names_the_base_model(source, ckpt, tmp_path):
    assert base_model(source) == base_model(ckpt / "hf") == HUB_ID
    export(ckpt, tmp_path / "out")
    metadata = ModelCard.load(tmp_path / "out" / "README.md").data
    assert (metadata.base_model, metadata.library_name) == (HUB_ID, "transformers")
    convert(tmp_path / "out", tmp_path / "again")  # the exported files keep the base model's name
    assert base_model(tmp_path / "again" / "hf") == HUB_ID


@pytest.mark.parametrize("shard_gib", [0.0, -1.0, float("nan")])
def test_a_shard_size_must_be_positive(shard_gib, ckpt, tmp_path):
    with pytest.raises(ValueError, match="must be greater than 0"):
        export(ckpt, tmp_path / "out", max_shard_gib=shard_gib)


@pytest.fixture
def hf(source, tmp_path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "hf", ignore=shutil.ignore_patterns("*.safetensors")))


def written(hf: Path) -> dict:
    return {name: json.loads(content) for name, content in read_side_files(hf).items() if name.endswith(".json")}


def nest_processors(hf: Path) -> dict:
    """Adds the processor file of transformers 5, and returns its content."""
    image, video = (json.loads((hf / name).read_text()) for name in PROCESSORS)
    edit(hf / "processor_config.json", {"image_processor": image, "video_processor": video})
    return json.loads((hf / "processor_config.json").read_text())


def test_transformers_5_processor_file_yields_the_published_ones(hf):
    flat = [json.loads((hf / name).read_text()) for name in PROCESSORS]
    nest_processors(hf)
    for name in PROCESSORS:
        (hf / name).unlink()
    assert [written(hf)[name] for name in PROCESSORS] == flat


def test_published_processor_files_stay_alone(hf):
    """Transformers before 4.56 cannot load a directory with the file of transformers 5."""
    assert "processor_config.json" not in written(hf)
    (hf / "processor_config.json").write_text(json.dumps({"processor_class": "Other", "num_crops": 3}))
    assert written(hf)["processor_config.json"] == {"processor_class": "Other", "num_crops": 3}


def test_conflicting_processor_files_are_rejected(hf):
    nested = nest_processors(hf)
    nested["image_processor"] |= {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": None}
    (hf / "processor_config.json").write_text(json.dumps(nested))
    read_side_files(hf)
    edit(hf / PROCESSORS[0], {"merge_size": 3})
    with pytest.raises(ValueError, match=r"image_processor.merge_size=2, preprocessor_config.json has 3"):
        read_side_files(hf)


@pytest.mark.parametrize("place", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_a_chat_template_is_exported_to_all_locations(place, hf):
    template = "{{ messages[0].content }} \N{SNOWMAN}"
    (hf / "chat_template.jinja").unlink()
    if place.endswith(".jinja"):
        (hf / place).write_text(template, encoding="utf-8")
    else:
        edit(hf / place, {"chat_template": template})
    files = read_side_files(hf)
    assert files["chat_template.jinja"].decode() == template
    for name in ("chat_template.json", "tokenizer_config.json"):
        assert json.loads(files[name])["chat_template"] == template
    for name, content in files.items():
        (hf / name).write_bytes(content)
    assert transformers.AutoTokenizer.from_pretrained(hf).chat_template == template


def test_conflicting_chat_templates_are_rejected(hf):
    (hf / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    with pytest.raises(ValueError, match=r"chat_template.json and chat_template.jinja hold different chat templates"):
        read_side_files(hf)


def test_the_sources_model_card_and_weights_are_not_copied(hf):
    for name in ("README.md", "model.safetensors", "model.safetensors.index.json", "LICENSE"):
        (hf / name).touch()
    assert {"LICENSE", "config.json"} <= set(read_side_files(hf))
    assert not {"README.md", "model.safetensors", "model.safetensors.index.json"} & set(read_side_files(hf))


def test_an_adapter_alone_has_no_card_for_an_evaluation(monkeypatch, capsys):
    command = ["export", "--adapter", "--evaluation", "runs/eval", "--src", "runs/rl/checkpoints/1", "--dst", "adapter"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        main()
    assert "--evaluation has no effect with --adapter" in capsys.readouterr().err
