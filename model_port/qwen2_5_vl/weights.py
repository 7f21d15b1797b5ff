"""The weight rules of Qwen2.5-VL's vision tower."""

from model_port.qwen2_5_vl.config import Qwen25VisionConfig
from model_port.rule import Rule, linear_rules, vision_attention_rules


def vision_rules(c: Qwen25VisionConfig, names: str) -> list[Rule]:
    """Returns the rules of the vision tower's tensors, whose Hugging Face names all start with `names`."""
    hf, ours, count = names + "blocks.{i}.", "vision.blocks.", c.num_layers
    patch_shape, merged = (c.num_channels, c.temporal_patch_frames, c.patch_px, c.patch_px), c.width * c.merge_unit
    return [
        Rule(names + "patch_embed.proj.weight", "vision.patch_embed.kernel_dc", (c.width, *patch_shape)),
        Rule(hf + "norm1.weight", ours + "attn_norm.scale", (c.width,), count),
        Rule(hf + "norm2.weight", ours + "mlp_norm.scale", (c.width,), count),
        *vision_attention_rules(c, hf, ours),
        *linear_rules(hf + "mlp.gate_proj", ours + "mlp.gate", "fd", (c.ffn_width, c.width), count),
        *linear_rules(hf + "mlp.up_proj", ours + "mlp.up", "fd", (c.ffn_width, c.width), count),
        *linear_rules(hf + "mlp.down_proj", ours + "mlp.down", "df", (c.width, c.ffn_width), count),
        Rule(names + "merger.ln_q.weight", "vision.merger.norm.scale", (c.width,)),
        *linear_rules(names + "merger.mlp.0", "vision.merger.up", "fd", (merged, merged)),
        *linear_rules(names + "merger.mlp.2", "vision.merger.down", "df", (c.out_width, merged)),
    ]
