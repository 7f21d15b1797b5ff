"""Qwen3-VL's mixtures of experts: their config.json and published sizes. Only the experts differ from Qwen3-VL."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from model_port.architecture import ModelConfig, TextConfig
from model_port.json_files import Section
from model_port.qwen3_vl import config as qwen3_vl

MODEL_TYPE = "qwen3_vl_moe"
MAX_EXPERTS = 4096


@dataclass(frozen=True)
class Qwen3MoeVisionConfig(qwen3_vl.Qwen3VisionConfig):
    """Qwen3-VL's vision tower."""

    family: ClassVar[str] = MODEL_TYPE


def from_hf(root: Section) -> ModelConfig:
    dense, text = qwen3_vl.from_hf(root), root.section("text_config")
    for key, supported in (("decoder_sparse_step", 1), ("mlp_only_layers", []), ("norm_topk_prob", True)):
        text.expect(key, supported)
    number_key = "num_local_experts" if text.has("num_local_experts") else "num_experts"  # transformers 5 or published
    language = replace(
        dense.text,
        ffn_width=text.count("moe_intermediate_size", 2**20),
        num_experts=text.count(number_key, MAX_EXPERTS),
        token_experts=text.count("num_experts_per_tok", MAX_EXPERTS),
    )
    return replace(dense, text=language, vision=Qwen3MoeVisionConfig(**vars(dense.vision)))


def to_hf(config: ModelConfig, dtype: str) -> dict[str, Any]:
    hf, text = qwen3_vl.to_hf(config, dtype), config.text
    hf |= {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": MODEL_TYPE}
    hf["text_config"] |= {
        "model_type": "qwen3_vl_moe_text",
        "intermediate_size": text.token_experts * text.ffn_width,  # for dense layers, of which there are none
        "moe_intermediate_size": text.ffn_width,
        "num_experts": text.num_experts,
        "num_experts_per_tok": text.token_experts,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    return hf


def _published(layers: int, width: int, ffn: int, heads: int) -> ModelConfig:
    return ModelConfig(
        TextConfig(layers, width, ffn, heads, num_kv_heads=4, num_experts=128, token_experts=8),
        Qwen3MoeVisionConfig(27, 1152, 4304, 16, width, deepstack_layers=(8, 16, 24)),
        tie_embeddings=False,
    )


# Dimensions of Qwen/Qwen3-VL-{30B-A3B,235B-A22B}-Instruct on the Hugging Face hub.
PRESETS = {"30b-a3b": _published(48, 2048, 768, 32), "235b-a22b": _published(94, 4096, 1536, 64)}

FAMILY = replace(qwen3_vl.FAMILY, title="Qwen3-VL-MoE", from_hf=from_hf, to_hf=to_hf, presets=PRESETS)
