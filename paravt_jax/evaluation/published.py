"""Tables 1, A, B and C of the paper's page (arXiv 2605.20342, evolvinglmms-lab.github.io/ParaVT), in percent.

None means that the number is not published. The ablations' format rewards and call counts are missing here, because the
paper measures them during training.
"""

from typing import NamedTuple

ALL = ("videomme", "videomme_subtitles", "longvideobench", "lvbench", "mlvu", "mmvu", "charades")
ABLATED = ("videomme", "videomme_subtitles", "lvbench", "mlvu")


class PublishedTable(NamedTuple):
    title: str
    splits: tuple[str, ...]
    rows: dict[str, tuple[float | None, ...]]


TABLES = (
    PublishedTable(
        "1: open models of 7 to 8B, 64 frames",
        ALL,
        {
            "GPT-4o": (71.9, 77.2, 66.7, 34.7, 64.6, 66.7, None),
            "Gemini 1.5 Pro": (75.0, 81.3, 64.4, 33.1, 74.3, 65.8, None),
            "Qwen2.5-VL-7B": (55.7, 64.5, 46.4, 32.2, 47.8, 65.4, 31.6),
            "Video-R1-7B": (57.6, 66.0, 57.4, 36.9, 61.6, 61.3, 25.4),
            "VideoChat-R1-7B": (50.4, 58.2, 49.2, 23.8, 58.7, 65.0, 31.5),
            "VideoRFT-7B": (58.5, 65.6, 55.1, 38.0, 44.9, 42.7, 18.7),
            "Time-R1-7B": (58.9, 66.2, 56.0, 38.2, 60.5, 63.4, 34.7),
            "ReWatch-R1-7B": (58.8, 65.0, 53.6, 38.5, 60.1, 59.8, 20.2),
            "Video-Thinker-7B": (61.9, 65.3, 56.0, None, 65.2, 64.5, 29.0),
            "Qwen3-VL-8B": (59.9, 68.4, 52.2, 33.1, 58.3, 68.0, 49.3),
            "Conan-7B": (55.5, 62.8, 54.5, 38.2, 59.2, 64.0, 25.4),
            "LongVT-RFT-7B": (59.5, 66.0, 54.7, 37.9, 59.4, 63.4, 23.4),
            "SAGE-7B": (44.1, 52.4, 37.4, 31.8, 49.7, 55.7, 28.9),
            "VideoZoomer-7B": (45.3, 48.3, 39.6, 22.9, 46.2, 61.6, None),
            "ParaVT-8B": (62.1, 69.4, 60.4, 39.8, 65.0, 68.6, 50.1),
        },
    ),
    PublishedTable(
        "A: stages of training",
        ABLATED,
        {
            "Qwen3-VL-8B": (59.9, 68.4, 33.1, 58.3),
            "+ SFT cold start": (60.7, 69.0, 39.1, 63.7),
            "+ SFT + GRPO": (62.0, 68.6, 39.3, 64.5),
            "+ SFT + PARA-GRPO": (62.1, 69.4, 39.8, 65.0),
        },
    ),
    PublishedTable(
        "B: components",
        ABLATED,
        {
            "SFT + GRPO": (62.0, 68.6, 39.3, 64.5),
            "+ exploration anchoring": (61.7, 68.7, 39.3, 64.1),
            "+ nFrames gating": (61.3, 68.7, 39.1, 63.6),
            "PARA-GRPO": (62.1, 69.4, 39.8, 65.0),
            "without R_tool": (61.9, 68.5, 38.7, 64.3),
            "without the penalty": (61.6, 69.0, 38.8, 64.5),
        },
    ),
    PublishedTable(
        "C: dispatch",
        ABLATED,
        {"sequential": (61.4, 68.8, 37.5, 64.1), "parallel": (62.1, 69.4, 39.8, 65.0)},
    ),
)
