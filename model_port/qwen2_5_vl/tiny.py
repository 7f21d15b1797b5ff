"""What a tiny random Qwen2.5-VL has of its family: dimensions, chat template, and the processor's settings."""

from model_port.architecture import TINY_VISION, Tiny
from model_port.qwen2_5_vl.config import TRAITS, Qwen25VisionConfig
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE as WITHOUT_DEFAULT

# DIFFERS: the published template ignores tools and gives their responses the role `tool`. This one renders them as
# the template of the language model Qwen2.5 does, which is also Qwen3-VL's form.
CHAT_TEMPLATE = (
    "{%- if not messages or messages[0].role != 'system' %}"
    "{%- set messages = [{'role': 'system', 'content': 'You are a helpful assistant.'}] + messages %}"
    "{%- endif %}\n" + WITHOUT_DEFAULT
)
# As in the published towers, the last layer of each part attends to the frame.
VISION = Qwen25VisionConfig(**TINY_VISION, full_layers=(1, 3))
TINY = Tiny(
    VISION,
    (4, 6, 6),
    CHAT_TEMPLATE,
    "Qwen2VLVideoProcessor",
    pixel_mean=(0.48145466, 0.4578275, 0.40821073),
    pixel_std=(0.26862954, 0.26130258, 0.27577711),
    # ordinary tokens spell them
    absent_tokens=frozenset(("<tool_response>", "</tool_response>", "<think>", "</think>")),
    traits=TRAITS,
)
