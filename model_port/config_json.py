"""Reads and writes the parts of a `config.json` that all families share.

Every size has a limit far above published models, so that a mistaken number raises an error here.
"""

from dataclasses import replace
from typing import Any, cast

from model_port.architecture import TOKEN_IDS, ModelConfig, TextConfig
from model_port.json_files import Section

ROPE_KEYS = {"rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved"}
MAX_LAYERS, MAX_WIDTH, MAX_HEAD_DIM, MAX_THETA = 1024, 2**17, 2**13, 1e15


def rope_section(text: Section, *, interleaved: bool, other_name: str = "default") -> Section:
    """Reads the RoPE settings: `rope_scaling` (published files), or else `rope_parameters` (transformers 5).

    `rope_theta` may be beside them. Raises unless the type is "default" or its synonym `other_name`, without further
    settings.
    """
    sections = [text.section(name, {}) for name in ("rope_scaling", "rope_parameters")]
    for rope in sections:
        for key in ("rope_type", "type"):
            if rope.values.get(key) != other_name:
                rope.expect(key, "default")
        for key in rope.values.keys() - ROPE_KEYS:
            rope.expect(key, None)
        rope.expect("mrope_interleaved", interleaved)
    used = next(filter(lambda rope: rope.values, sections), text)
    if used.has("rope_theta"):
        return used
    return replace(used, values={**used.values, "rope_theta": text.values.get("rope_theta")}, prefix=text.prefix)


def text_config(
    text: Section,
    rope: Section,
    sections: tuple[int, int, int],
    norm_eps: float = 1e-6,
    rope_theta: float | None = None,
    max_positions: int = 128_000,
    **traits: bool,
) -> TextConfig:
    """Reads the language tower's config. The arguments are the family's defaults in transformers, and its traits."""
    text.expect("hidden_act", "silu")
    text.expect("use_sliding_window", False)
    for kind in dict.fromkeys(text.values.get("layer_types") or ()):
        replace(text, values={"layer_types": kind}).expect("layer_types", "full_attention")
    num_heads, width = text.count("num_attention_heads", 1024), text.count("hidden_size", MAX_WIDTH)
    mrope = rope.counts("mrope_section", MAX_HEAD_DIM, sections)
    if len(mrope) != 3:
        raise rope.wrong("mrope_section", "three numbers that sum to head_dim / 2")
    return TextConfig(
        num_layers=text.count("num_hidden_layers", MAX_LAYERS),
        width=width,
        ffn_width=text.count("intermediate_size", 2**20),
        num_heads=num_heads,
        num_kv_heads=text.count("num_key_value_heads", 1024, num_heads),
        head_dim=text.count("head_dim", MAX_HEAD_DIM, width // num_heads),
        vocab_size=text.count("vocab_size", 2**22),
        norm_eps=text.number("rms_norm_eps", 0, 1, norm_eps),
        rope_theta=rope.number("rope_theta", 1, MAX_THETA, rope_theta),
        mrope_sections=cast(tuple[int, int, int], mrope),
        max_positions=text.count("max_position_embeddings", 2**30, max_positions),
        **traits,
    )


def text_sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    text = config.text
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": text.width,
        "intermediate_size": text.ffn_width,
        "initializer_range": config.initializer_range,
        "max_position_embeddings": text.max_positions,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "num_key_value_heads": text.num_kv_heads,
        "rms_norm_eps": text.norm_eps,
        "rope_theta": text.rope_theta,
        "use_cache": True,
        "vocab_size": text.vocab_size,
    }


def vision_sizes(vision: Section, patch_px: int) -> dict[str, Any]:
    """Reads the fields that every family's vision tower has; `patch_px` is the family's default."""
    rope = vision.section("rope_parameters", {})
    rope.expect("rope_type", "axial")
    return dict(
        num_layers=vision.count("depth", MAX_LAYERS),
        width=vision.count("hidden_size", MAX_WIDTH),
        ffn_width=vision.count("intermediate_size", 2**20),
        num_heads=vision.count("num_heads", 1024),
        out_width=vision.count("out_hidden_size", MAX_WIDTH),
        patch_px=vision.count("patch_size", 256, patch_px),
        merge=vision.count("spatial_merge_size", 16, 2),
        temporal_patch_frames=vision.count("temporal_patch_size", 16, 2),
        rope_theta=rope.number("rope_theta", 1, MAX_THETA, 10_000.0),
    )


def vision_sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    vision = config.vision
    return {
        "model_type": vision.family,
        "depth": vision.num_layers,
        "hidden_size": vision.width,
        "intermediate_size": vision.ffn_width,
        "num_heads": vision.num_heads,
        "out_hidden_size": vision.out_width,
        "patch_size": vision.patch_px,
        "spatial_merge_size": vision.merge,
        "temporal_patch_size": vision.temporal_patch_frames,
        "in_channels": vision.num_channels,
        "initializer_range": config.initializer_range,
    }


def token_ids(root: Section, vocab_size: int) -> dict[str, int]:
    return {key: root.count(key, vocab_size - 1, usual, least=0) for key, usual in TOKEN_IDS.items()}


def token_ids_to_hf(config: ModelConfig) -> dict[str, int]:
    return {key: getattr(config, key) for key in TOKEN_IDS}
