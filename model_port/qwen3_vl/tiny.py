"""What a tiny random Qwen3-VL has of its family: dimensions, chat template, and the processor's settings."""

from model_port.architecture import ModelConfig, TextConfig, Tiny
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.qwen3_vl.config import Qwen3VisionConfig


def dimensions(vocab_size: int) -> ModelConfig:
    """About a million parameters, half of them in the text layers."""
    return ModelConfig(
        text=TextConfig(
            num_layers=4,
            width=128,
            ffn_width=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            vocab_size=vocab_size,
            rope_theta=10_000.0,  # contexts are short; the published 5e6 would leave most frequencies unused
            mrope_sections=(6, 5, 5),
            max_positions=32_768,
        ),
        vision=Qwen3VisionConfig(
            num_layers=4,
            width=32,  # enough for plain patches; the mergers grow with its square
            ffn_width=64,
            num_heads=2,
            out_width=128,
            # As in the published towers: the last layer of each of the first three quarters is tapped, and only the
            # first three text layers get a map.
            deepstack_layers=(0, 1, 2),
            num_positions=256,  # 16 x 16 patches, a 256 px frame; the table is interpolated
        ),
        tie_embeddings=True,
        initializer_range=0.05,  # 0.02 is for widths in the thousands and trains slowly at this one
    )


TINY = Tiny(dimensions, CHAT_TEMPLATE, "Qwen3VLVideoProcessor")
