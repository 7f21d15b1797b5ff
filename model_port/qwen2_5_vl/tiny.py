"""What a tiny random Qwen2.5-VL has of its family: dimensions, chat template, and the processor's settings."""

from model_port.architecture import ModelConfig, TextConfig, Tiny
from model_port.qwen2_5_vl.config import TRAITS, Qwen25VisionConfig
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE as WITHOUT_DEFAULT

# DIFFERS: the published template ignores tools and gives their responses the role `tool`. This one renders them as
# the template of the language model Qwen2.5 does, which is also Qwen3-VL's form.
CHAT_TEMPLATE = (
    "{%- if not messages or messages[0].role != 'system' %}"
    "{%- set messages = [{'role': 'system', 'content': 'You are a helpful assistant.'}] + messages %}"
    "{%- endif %}\n" + WITHOUT_DEFAULT
)


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
            rope_theta=10_000.0,  # contexts are short
            mrope_sections=(4, 6, 6),
            max_positions=32_768,
            **TRAITS,
        ),
        vision=Qwen25VisionConfig(
            num_layers=4,
            width=32,
            ffn_width=64,
            num_heads=2,
            out_width=128,
            full_layers=(1, 3),  # as in the published towers, the last layer of each part attends to the frame
        ),
        tie_embeddings=True,
        initializer_range=0.05,
    )


TINY = Tiny(
    dimensions,
    CHAT_TEMPLATE,
    "Qwen2VLVideoProcessor",
    pixel_mean=(0.48145466, 0.4578275, 0.40821073),
    pixel_std=(0.26862954, 0.26130258, 0.27577711),
    absent_tokens=frozenset(
        ("<tool_response>", "</tool_response>", "<think>", "</think>")
    ),  # ordinary tokens spell them
)
