"""The parts of a tiny random Qwen2.5-VL that depend on its family: dimensions, chat template, processor settings."""

from model_port.architecture import TINY_VISION, Tiny
from model_port.qwen2_5_vl.config import TRAITS, Qwen25VisionConfig
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE as WITHOUT_DEFAULT

# DIFFERS: the published template ignores tools and gives their responses the role `tool`. This template renders both as
# the language model Qwen2.5 and Qwen3-VL do.
CHAT_TEMPLATE = (
    "{%- if not messages or messages[0].role != 'system' %}"
    "{%- set messages = [{'role': 'system', 'content': 'You are a helpful assistant.'}] + messages %}"
    "{%- endif %}\n" + WITHOUT_DEFAULT
)
# As in the published towers, the last layer of each part attends to the whole frame.
VISION = Qwen25VisionConfig(**TINY_VISION, full_layers=(1, 3))
TINY = Tiny(
    VISION,
    (4, 6, 6),
    CHAT_TEMPLATE,
    "Qwen2VLVideoProcessor",
    pixel_mean=(0.48145466, 0.4578275, 0.40821073),
    pixel_std=(0.26862954, 0.26130258, 0.27577711),
    # In Qwen2.5-VL these are spelled with ordinary tokens.
    absent_tokens=frozenset(("<tool_response>", "</tool_response>", "<think>", "</think>")),
    traits=TRAITS,
)
