"""Small models of the released architecture."""

from collections.abc import Callable

from model_port.config import ModelConfig, TextConfig
from model_port.qwen3_vl.config import Qwen3VisionConfig
from model_port.tiny import tiny_config

# 53M and 123M parameters; the larger has about a tenth of the 2B model in every relevant dimension.
SMALL = ModelConfig(
    TextConfig(12, 512, 1536, 8, 4, head_dim=64, vocab_size=10_000, mrope_sections=(12, 10, 10)),
    Qwen3VisionConfig(4, 256, 1024, 4, 512, (1, 2, 3), num_positions=576),
    tie_embeddings=True,
    image_token_id=9_990,
    video_token_id=9_991,
    vision_start_token_id=9_992,
    vision_end_token_id=9_993,
)
MID = ModelConfig(
    TextConfig(12, 640, 2560, 10, 5, head_dim=64, vocab_size=32_000, mrope_sections=(12, 10, 10)),
    Qwen3VisionConfig(8, 384, 1536, 6, 640, (2, 4, 6), num_positions=576),
    tie_embeddings=True,
    image_token_id=31_990,
    video_token_id=31_991,
    vision_start_token_id=31_992,
    vision_end_token_id=31_993,
)
MODELS: dict[str, Callable[[], ModelConfig]] = {"tiny": tiny_config, "small": lambda: SMALL, "mid": lambda: MID}
