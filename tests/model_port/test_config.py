"""Hugging Face configs are read in both formats and written back; unsupported settings are rejected by name."""

import json

import pytest

from model_port.config import PRESETS, config_from_hf, config_to_hf, preset, read_hf_config
from model_port.weights import num_params


def edited(name, **changes):
    """Returns a published config with dotted keys changed; None removes a key."""
    hf = config_to_hf(PRESETS[name])
    for dotted, value in changes.items():
        *path, key = dotted.split(".")
        section = hf
        for part in path:
            section = section[part]
        section.pop(key, None) if value is None else section.__setitem__(key, value)
    return hf


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_survives_its_own_config_json(name):
    assert config_from_hf(json.loads(json.dumps(config_to_hf(PRESETS[name])))) == PRESETS[name]


def read_by_transformers(hf: dict):
    from transformers import AutoConfig

    return AutoConfig.for_model(hf.pop("model_type"), **hf)


@pytest.mark.parametrize("name", PRESETS)
def test_transformers_reads_a_preset_as_we_do(name):
    theirs = read_by_transformers(config_to_hf(PRESETS[name])).to_dict()
    assert "rope_parameters" in theirs["text_config"]  # the new format, written by transformers
    assert config_from_hf(theirs) == PRESETS[name]


@pytest.mark.parametrize("name", ["4b", "8b", "30b-a3b"])
def test_embeddings_are_tied_where_transformers_4_reads_it(name):
    assert config_to_hf(PRESETS[name])["text_config"]["tie_word_embeddings"] == (name == "4b")


@pytest.mark.parametrize("name", ["8b", "qwen2.5-vl-7b"])
def test_rope_theta_may_be_beside_rope_parameters(name):
    theirs = read_by_transformers(config_to_hf(PRESETS[name])).to_dict()
    theirs["text_config"]["rope_parameters"].pop("rope_theta")
    theirs["text_config"]["rope_theta"] = 7e5
    assert config_from_hf(theirs).text.rope_theta == 7e5
    assert read_by_transformers(theirs).text_config.rope_parameters["rope_theta"] == 7e5


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("2b", 2.127532032), ("4b", 4.437815808), ("8b", 8.767123696), ("32b", 33.357390064)),
        *(("30b-a3b", 31.070754032), ("235b-a22b", 235.670022896)),
        *(("qwen2.5-vl-3b", 3.754622976), ("qwen2.5-vl-7b", 8.292166656)),
        *(("qwen2.5-vl-32b", 33.452718336), ("qwen2.5-vl-72b", 73.410777344)),
    ],
)
def test_presets_have_the_published_number_of_parameters(name, billions):
    assert num_params(preset(name.upper())) == round(billions * 1e9)


UNSUPPORTED = {  # changes of a preset's config, and the error
    "8b": [
        ({"model_type": "qwen3_omni_moe", "architectures": ["Qwen3OmniMoeForConditionalGeneration"]},
         "'qwen3_omni_moe' .Qwen3OmniMoeForConditionalGeneration. is not supported; supported are "
         r"'qwen3_vl' \(Qwen3-VL\), 'qwen3_vl_moe' \(Qwen3-VL-MoE\) and 'qwen2_5_vl' \(Qwen2.5-VL\)"),
        ({"model_type": None}, "model_type None"),
        ({"text_config.hidden_act": "gelu"}, "hidden_act='gelu' is not supported; expected 'silu'"),
        ({"text_config.attention_bias": True}, "attention_bias=True"),
        ({"text_config.rope_scaling": {"rope_type": "yarn", "mrope_section": [24, 20, 20]}}, "rope_type='yarn'"),
        ({"text_config.rope_scaling": {"mrope_interleaved": False}}, "mrope_interleaved=False"),
        ({"text_config.hidden_size": None}, "key 'text_config.hidden_size' is missing"),
        ({"vision_config.deepstack_visual_indexes": [8, 27]}, "deepstack_visual_indexes .8, 27. must ascend"),
        ({"vision_config.out_hidden_size": 2048}, "out_hidden_size 2048 differs from text hidden_size 4096"),
        ({"text_config.num_key_value_heads": 5}, "not a multiple of num_key_value_heads 5"),
        ({"text_config.use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"text_config.layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention' is"),
        ({"text_config.rope_scaling": {"rope_type": "default", "type": "yarn"}}, "type='yarn' is not supported"),
        ({"text_config.rope_scaling": {"factor": 4.0}}, "factor=4.0 is not supported"),
        ({"text_config.rope_parameters": {"rope_theta": 5e6}, "text_config.rope_scaling": {"rope_type": "yarn"}},
         r"text_config\.rope_scaling\.rope_type='yarn' is not supported"),
        ({"text_config.rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: quantized weights are not supported"),
        ({"text_config.quantization_config": {"bits": 4}}, "text_config.quantization_config: quantized weights are"),
        ({"compression_config": {"format": "dense"}}, "compression_config: quantized weights are not supported"),
    ],
    "qwen2.5-vl-7b": [
        ({"rope_scaling": {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0}}, "type='yarn'"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not supported"),
        ({"rope_scaling": {"type": "mrope", "mrope_interleaved": True}}, "mrope_interleaved=True is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "full_attention={'rope_type': 'yarn'} is not"),
        ({"rope_scaling.mrope_section": [16, 24]}, "mrope_section=.16, 24. must be three numbers"),
        ({"head_dim": 64}, "must be three numbers|mrope_section"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: quantized weights are not supported"),
        ({"vision_config.quantization_config": {"bits": 8}}, "vision_config.quantization_config: quantized weights"),
        ({"vision_config.hidden_act": "quick_gelu"}, "vision_config.hidden_act='quick_gelu'"),
        ({"vision_config.fullatt_block_indexes": [7, 32]}, r"fullatt_block_indexes \[7, 32\] must be within 32 layers"),
        ({"vision_config.window_size": 14}, "window_size 14 is smaller than a token's 28 px"),
        ({"vision_config": None}, "key 'vision_config' is missing"),
    ],
    "30b-a3b": [
        ({"text_config.decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; expected 1"),
        ({"text_config.mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported"),
        ({"text_config.norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"text_config.num_experts": None}, "key 'text_config.num_experts' is missing"),
        ({"text_config.num_experts_per_tok": 129}, "num_experts_per_tok 129 is more than num_experts 128"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "message"), [(n, *case) for n, cases in UNSUPPORTED.items() for case in cases]
)
def test_unsupported_settings_are_rejected_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(edited(name, **changes))


def test_the_text_keys_of_qwen2_5_may_be_in_a_section():
    hf = config_to_hf(PRESETS["qwen2.5-vl-7b"])
    moved = {key: hf[key] for key in hf if "token_id" not in key and key not in ("model_type", "vision_config")}
    nested = {key: value for key, value in hf.items() if key not in moved} | {"text_config": moved}
    assert config_from_hf(nested) == config_from_hf(hf) == PRESETS["qwen2.5-vl-7b"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "absent", "is not a directory"),
        (lambda path: path, "has no config.json"),
        (lambda path: (path / "config.json").write_text("{") and path, "is not valid JSON"),
    ],
)
def test_a_path_without_a_model_is_named(tmp_path, make, message):
    with pytest.raises(ValueError, match=message):
        read_hf_config(make(tmp_path))


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(ValueError, match="unknown model '7b'; use one of 2b, 4b, 8b, 32b"):
        preset("7b")
