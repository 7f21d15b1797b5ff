"""The parts of a tiny random Qwen3-VL that depend on its family: dimensions, chat template, processor settings."""

from model_port.architecture import TINY_VISION, Tiny
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.qwen3_vl.config import Qwen3VisionConfig

VISION = Qwen3VisionConfig(
    **TINY_VISION,
    # As in the published towers, the maps come from the last layer of each of the first three quarters, and only the
    # first three text layers get a map.
    deepstack_layers=(0, 1, 2),
    num_positions=256,  # 16 x 16 patches, a 256 px frame; the table is interpolated
)
TINY = Tiny(VISION, (6, 5, 5), CHAT_TEMPLATE, "Qwen3VLVideoProcessor")
