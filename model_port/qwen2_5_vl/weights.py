"""Names and shapes of the vision tower's tensors."""

from model_port.qwen2_5_vl.config import Qwen25VisionConfig
from model_port.rule import Rule, vision_attention_rules


def vision_rules(c: Qwen25VisionConfig, names: str) -> list[Rule]:
    """The vision tower's; `names` starts all names of its tensors."""
    hf, ours, count = names + "blocks.{i}.", "vision.blocks.", c.num_layers
    patch_shape, merged = (c.num_channels, c.temporal_patch_frames, c.patch_px, c.patch_px), c.width * c.merge_unit
    return [
        Rule(names + "patch_embed.proj.weight", "vision.patch_embed.kernel_dc", (c.width, *patch_shape)),
        Rule(hf + "norm1.weight", ours + "attn_norm.scale", (c.width,), count),
        Rule(hf + "norm2.weight", ours + "mlp_norm.scale", (c.width,), count),
        *vision_attention_rules(c, hf, ours),
        Rule(hf + "mlp.gate_proj.weight", ours + "mlp.gate_kernel_fd", (c.ffn_width, c.width), count),
        Rule(hf + "mlp.gate_proj.bias", ours + "mlp.gate_bias", (c.ffn_width,), count),
        Rule(hf + "mlp.up_proj.weight", ours + "mlp.up_kernel_fd", (c.ffn_width, c.width), count),
        Rule(hf + "mlp.up_proj.bias", ours + "mlp.up_bias", (c.ffn_width,), count),
        Rule(hf + "mlp.down_proj.weight", ours + "mlp.down_kernel_df", (c.width, c.ffn_width), count),
        Rule(hf + "mlp.down_proj.bias", ours + "mlp.down_bias", (c.width,), count),
        Rule(names + "merger.ln_q.weight", "vision.merger.norm.scale", (c.width,)),
        Rule(names + "merger.mlp.0.weight", "vision.merger.up_kernel_fd", (merged, merged)),
        Rule(names + "merger.mlp.0.bias", "vision.merger.up_bias", (merged,)),
        Rule(names + "merger.mlp.2.weight", "vision.merger.down_kernel_df", (c.out_width, merged)),
        Rule(names + "merger.mlp.2.bias", "vision.merger.down_bias", (c.out_width,)),
    ]
