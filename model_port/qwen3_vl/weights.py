"""The weight rules of Qwen3-VL's vision tower."""

from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.rule import Rule, layer_norm_rules, linear_rules, vision_attention_rules


def vision_rules(c: Qwen3VisionConfig, names: str) -> list[Rule]:
    """Returns the rules of the vision tower's tensors, whose Hugging Face names all start with `names`."""
    hf, ours, count = names + "blocks.{i}.", "vision.blocks.", c.num_layers
    patch_shape, merged = (c.num_channels, c.temporal_patch_frames, c.patch_px, c.patch_px), c.width * c.merge_unit
    table = [
        Rule(names + "patch_embed.proj.weight", "vision.patch_embed.kernel_dc", (c.width, *patch_shape)),
        Rule(names + "patch_embed.proj.bias", "vision.patch_embed.bias", (c.width,)),
        Rule(names + "pos_embed.weight", "vision.pos_embed.table_sd", (c.num_positions, c.width)),
        *layer_norm_rules(hf + "norm1", ours + "attn_norm", c.width, count),
        *vision_attention_rules(c, hf, ours),
        *layer_norm_rules(hf + "norm2", ours + "mlp_norm", c.width, count),
        *linear_rules(hf + "mlp.linear_fc1", ours + "mlp.up", "fd", (c.ffn_width, c.width), count),
        *linear_rules(hf + "mlp.linear_fc2", ours + "mlp.down", "df", (c.width, c.ffn_width), count),
    ]
    for hf, ours, norm_width, count in (
        ("merger.", "vision.merger.", c.width, None),
        ("deepstack_merger_list.{i}.", "vision.deepstack_mergers.", merged, c.num_deepstack),
    ):
        table += [
            *layer_norm_rules(names + hf + "norm", ours + "norm", norm_width, count),
            *linear_rules(names + hf + "linear_fc1", ours + "up", "fd", (merged, merged), count),
            *linear_rules(names + hf + "linear_fc2", ours + "down", "df", (c.out_width, merged), count),
        ]
    return table
