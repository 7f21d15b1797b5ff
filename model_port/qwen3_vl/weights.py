"""Names and shapes of the vision tower's tensors."""

from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.rule import Rule, vision_attention_rules


def vision_rules(c: Qwen3VisionConfig, names: str) -> list[Rule]:
    """The vision tower's; `names` starts all names of its tensors."""
    hf, ours, count = names + "blocks.{i}.", "vision.blocks.", c.num_layers
    patch_shape = (c.num_channels, c.temporal_patch_frames, c.patch_px, c.patch_px)
    return [
        Rule(names + "patch_embed.proj.weight", "vision.patch_embed.kernel_dc", (c.width, *patch_shape)),
        Rule(names + "patch_embed.proj.bias", "vision.patch_embed.bias", (c.width,)),
        Rule(names + "pos_embed.weight", "vision.pos_embed.table_sd", (c.num_positions, c.width)),
        Rule(hf + "norm1.weight", ours + "attn_norm.scale", (c.width,), count),
        Rule(hf + "norm1.bias", ours + "attn_norm.bias", (c.width,), count),
        *vision_attention_rules(c, hf, ours),
        Rule(hf + "norm2.weight", ours + "mlp_norm.scale", (c.width,), count),
        Rule(hf + "norm2.bias", ours + "mlp_norm.bias", (c.width,), count),
        Rule(hf + "mlp.linear_fc1.weight", ours + "mlp.up_kernel_fd", (c.ffn_width, c.width), count),
        Rule(hf + "mlp.linear_fc1.bias", ours + "mlp.up_bias", (c.ffn_width,), count),
        Rule(hf + "mlp.linear_fc2.weight", ours + "mlp.down_kernel_df", (c.width, c.ffn_width), count),
        Rule(hf + "mlp.linear_fc2.bias", ours + "mlp.down_bias", (c.width,), count),
        *_merger_rules(c, names + "merger.", "vision.merger.", c.width, None),
        *_merger_rules(
            c,
            names + "deepstack_merger_list.{i}.",
            "vision.deepstack_mergers.",
            c.width * c.merge_unit,
            c.num_deepstack,
        ),
    ]


def _merger_rules(c: Qwen3VisionConfig, hf: str, ours: str, norm_width: int, count: int | None) -> list[Rule]:
    merged, out = c.width * c.merge_unit, c.out_width
    return [
        Rule(hf + "norm.weight", ours + "norm.scale", (norm_width,), count),
        Rule(hf + "norm.bias", ours + "norm.bias", (norm_width,), count),
        Rule(hf + "linear_fc1.weight", ours + "up_kernel_fd", (merged, merged), count),
        Rule(hf + "linear_fc1.bias", ours + "up_bias", (merged,), count),
        Rule(hf + "linear_fc2.weight", ours + "down_kernel_df", (out, merged), count),
        Rule(hf + "linear_fc2.bias", ours + "down_bias", (out,), count),
    ]
