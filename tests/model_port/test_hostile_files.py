"""Model and adapter files with invalid values give a one-line error with the file and the key."""

import json
import shutil
from contextlib import suppress

import pytest
from changed_files import edit
from hypothesis import HealthCheck, given, settings, strategies as st

import model_port
from model_port.adapters import AdapterBase, AdapterInfo, new_adapter, read_adapter_info, write_adapter
from model_port.config import LoraConfig, config_from_hf, read_hf_config
from model_port.hf_files import base_model, read_side_files, with_dtype, with_pixel_bounds
from model_port.processing import VisionContract
from model_port.tiny import tiny_config
from rollout.chat import Chat

CONFIG, PROCESSOR = "config.json", "processor_config.json"
FLAT, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
ADAPTER = "adapter_config.json"
WRONG = ([], {}, "x", -1, 10**30, True, float("nan"), float("inf"), 1e999, [None], {"a": 1})


def readable(directory):
    """Reads all of a model's files that are read before its weights."""
    config_from_hf(read_hf_config(directory), str(directory / CONFIG))
    base_model(directory)
    VisionContract.from_hf(directory)
    with_pixel_bounds(with_dtype(read_side_files(directory), "bfloat16"), 784, 50176)


@pytest.fixture
def model(tiny_hf, tmp_path):
    return shutil.copytree(tiny_hf, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))


@pytest.fixture(scope="module")
def adapter(tiny_hf, tmp_path_factory):
    directory, lora = tmp_path_factory.mktemp("adapter"), LoraConfig(rank=2, alpha=4.0)
    info = AdapterInfo(lora, AdapterBase(str(tiny_hf), "float32", "0" * 32))
    write_adapter(directory, tiny_config(), info, new_adapter(tiny_config(), lora, seed=0))
    return directory


SIZES = (
    *(f"text_config.{key}" for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")),
    *(f"text_config.{key}" for key in ("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings")),
    *(f"vision_config.{key}" for key in ("depth", "hidden_size", "intermediate_size", "num_heads", "out_hidden_size")),
    *(f"vision_config.{key}" for key in ("num_position_embeddings", "patch_size", "spatial_merge_size", "in_channels")),
    *("vision_config.temporal_patch_size", "image_token_id", "video_token_id"),
)
NUMBERS = ("text_config.rope_theta", "text_config.rms_norm_eps", "text_config.initializer_range")


@pytest.mark.parametrize("key", [*SIZES, *NUMBERS])
def test_numbers_in_config_json_are_validated(key, model):
    edits = [*WRONG, 10**9, "4"] if key in SIZES else [*WRONG, "4"]
    before = (model / CONFIG).read_text()
    for value in edits:
        (model / CONFIG).write_text(before)
        edit(model / CONFIG, {key: value})
        if key.endswith("max_position_embeddings") and value == 10**9:
            continue
        with pytest.raises(ValueError, match=rf"^{model / CONFIG}: {key}=.* must be a (whole )?number from") as raised:
            model_port.load(model)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        (CONFIG, "text_config", None, "key 'text_config' is missing"),
        (CONFIG, "vision_config", [1], r"vision_config=\[1\] must be an object"),
        (CONFIG, "architectures", 5, None),
        (CONFIG, "model_type", ["qwen3_vl"], r"model_type \['qwen3_vl'\] .* is not supported"),
        (CONFIG, "tie_word_embeddings", "false", "tie_word_embeddings='false' must be true or false"),
        (CONFIG, "text_config.rope_scaling", [1], r"text_config.rope_scaling=\[1\] must be an object"),
        (CONFIG, "text_config.rope_scaling.mrope_section", "abc", "mrope_section='abc' must be a list of whole"),
        (CONFIG, "text_config.rope_scaling.mrope_section", [6, 5], r"mrope_section=\[6, 5\] must be three numbers"),
        (CONFIG, "text_config.rope_theta", None, "key 'text_config.rope_theta' is missing"),
        (CONFIG, "text_config.rope_scaling", {"rope_theta": float("nan")}, r"rope_scaling.rope_theta=nan must"),
        (CONFIG, "vision_config.rope_parameters", {"rope_theta": -1}, "rope_theta=-1 must be a number from 1"),
        (CONFIG, "vision_config.deepstack_visual_indexes", 3, "deepstack_visual_indexes=3 must be a list"),
        (CONFIG, "text_config.hidden_act", {}, r"text_config.hidden_act=\{\} is not supported"),
        (CONFIG, "_name_or_path", [1], None),
        (FLAT, "patch_size", "16", "patch_size='16' must be a whole number from 1 to 256"),
        (FLAT, "size", [1], r"size=\[1\] must be an object"),
        (FLAT, "size.longest_edge", 10**15, "size.longest_edge=1000000000000000 must be a whole number from 1"),
        (FLAT, "size.shortest_edge", [1], r"size.shortest_edge=\[1\] must be a whole number"),
        (FLAT, "image_std", [float("inf")] * 3, "image_std=.* must be a list of 3 numbers"),
        (FLAT, "rescale_factor", "1/255", "rescale_factor='1/255' must be a number"),
        (PROCESSOR, "image_processor", 3, "image_processor=3 must be an object"),
        (PROCESSOR, "video_processor", "x", "video_processor='x' must be an object"),
        ("tokenizer_config.json", "chat_template", 5, None),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named_with_its_file(file, key, value, message, model):
    edit(model / file, {key: value})
    if message is None:
        readable(model)
        return
    with pytest.raises(ValueError, match=message) as raised:
        readable(model)
    assert str(raised.value).startswith(str(model / file)) and len(str(raised.value)) < 500


FILES = (
    *(CONFIG, PROCESSOR, FLAT, VIDEO, "generation_config.json", "tokenizer_config.json", "chat_template.json"),
    *("tokenizer.json", "chat_template.jinja"),
)


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff\xfe", b"[" * 10**5], ids=range(4))
def test_a_file_that_is_not_a_json_object_is_named(file, content, model):
    (model / file).write_bytes(content)
    if file == "chat_template.jinja" and content != b"\xff\xfe":
        return
    read = Chat.from_hf if file == "tokenizer.json" else readable
    with pytest.raises(ValueError, match=rf"^{model / file}:? (is|must hold|has) ") as raised:
        read(model)
    assert len(str(raised.value)) < 500


def test_a_huge_file_is_not_read(model):
    for name in ("tokenizer.json", "chat_template.jinja"):
        with (model / name).open("wb") as file:
            file.truncate(2**32)  # a sparse file that takes no disk space
        with pytest.raises(ValueError, match=rf"{name} has 4294967296 bytes, more than"):
            read_side_files(model)
        with pytest.raises(ValueError, match=r"has 4294967296 bytes, more than"):
            Chat.from_hf(model)


@pytest.mark.parametrize(
    ("file", "key", "value", "message"),
    [
        (ADAPTER, "r", "8", "r='8' must be a whole number from 1 to 4096"),
        (ADAPTER, "r", None, "key 'r' is missing"),
        (ADAPTER, "lora_alpha", "x", "lora_alpha='x' must be a number"),
        (ADAPTER, "lora_alpha", float("nan"), "lora_alpha=nan must be a number"),
        (ADAPTER, "lora_alpha", 0, "lora_alpha=0 must be a number"),
        (ADAPTER, "base_model_name_or_path", 5, "base_model_name_or_path=5 must be text"),
        (ADAPTER, "base_model_name_or_path", "", "has no base_model_name_or_path"),
        (ADAPTER, "alpha_pattern", [1], r"alpha_pattern=\[1\] is not supported"),
        ("paravt_jax.json", "base", 3, "base=3 must be an object"),
        ("paravt_jax.json", "base.dtype", "int8", "base.dtype='int8' must be one of float32"),
        ("paravt_jax.json", "base.dtype", [1], r"base.dtype=\[1\] must be text"),
        ("paravt_jax.json", "base.sum", 5, "base.sum=5 must be text"),
    ],
)
def test_an_invalid_adapter_value_is_named_with_its_file(file, key, value, message, adapter, tmp_path):
    adapter = shutil.copytree(adapter, tmp_path / "adapter")
    edit(adapter / file, {key: value})
    with pytest.raises(ValueError, match=message) as raised:
        model_port.load(adapter)
    assert str(raised.value).startswith(str(adapter / file))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_content_is_read_or_rejected(data, tiny_hf, adapter, tmp_path_factory):
    """Only errors with a message for the user may be raised."""
    directory = tmp_path_factory.mktemp("fuzzed")
    names = [*FILES[:7], ADAPTER, "paravt_jax.json"]
    for source, name in ((tiny_hf, one) for one in FILES):
        if (source / name).is_file():
            shutil.copy(source / name, directory)
    for name in (ADAPTER, "paravt_jax.json"):
        shutil.copy(adapter / name, directory)
    name = data.draw(st.sampled_from(names))
    whole = json.loads((directory / name).read_text()) if (directory / name).exists() else {}
    section = whole
    while True:
        key = data.draw(st.sampled_from(sorted(section)) if section else st.just("new"))
        if not isinstance(section.get(key), dict) or data.draw(st.booleans()):
            break
        section = section[key]
    section[key] = data.draw(values)
    (directory / name).write_text(json.dumps(whole))
    for read in (readable, read_adapter_info):
        with suppress(ValueError):
            read(directory)
    shutil.rmtree(directory)
