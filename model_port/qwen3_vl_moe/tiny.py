"""The parts of a tiny random Qwen3-VL-MoE that depend on its family: Qwen3-VL's, and experts."""

from dataclasses import replace

from model_port.qwen3_vl import tiny as qwen3_vl
from model_port.qwen3_vl_moe.config import Qwen3MoeVisionConfig

TINY = replace(
    qwen3_vl.TINY,
    vision=Qwen3MoeVisionConfig(**vars(qwen3_vl.VISION)),
    traits={"ffn_width": 48, "num_experts": 8, "token_experts": 2},
)
