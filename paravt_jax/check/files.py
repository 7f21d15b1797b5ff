"""Stage `files`: tokenizer, chat template and processor give the same results as transformers."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from model_port.processing import VisionContract, process_images
from model_port.weights import in_words, num_params
from paravt_jax.check.report import Measured
from paravt_jax.check.target import Target
from rollout.prompts import Prompts, main_messages
from rollout.tools import CROP_VIDEO_SCHEMA
from rollout.tools_text import with_tools

# Where tokenizers differ: accents in two forms, joined emoji, scripts without spaces, right to left, white space,
# digits, contractions, added tokens within words, and answer tags, which share tokens with their neighbors.
HARD_TEXTS = (
    "Größe, GRÖSSE, naïve, e\u0301te\u0301, \u1e9e, ﬁne",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪 ☃️",
    "视频里有什么？動画の中に何がありますか。영상에 무엇이 있습니까?",
    "ما الذي يظهر في الفيديو؟ מה מופיע",
    "  two\n\n\n three\t\tfour \r\n five   \n",
    "3.14159 1,234,567 00:01:23.450 2026-11-26 1e-05 ½ ²³",
    "I'll we've they'd IT'S don't",
    '<think>\nNow.</think>\n\n<tool_call>\n{"name": "crop_video"}\n</tool_call><|im_end|>',
    "x<|im_start|>y<|image_pad|>z <|vision_start|><|vision_end|>",
    "<answer>B</answer>. </answer>) <answer> 7</answer>\n",
    "def f(x):\n    return {'a': [1, 2]}  # comment\n",
    "\u200b\u00a0\u3000zero width and wide spaces\ufeff",
)
SIZES_PX = ((720, 1280), (64, 96), (333, 512), (1080, 1920))


def files(target: Target) -> Iterator[Measured]:
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    params = f"{in_words(num_params(target.config))} parameters, {target.config.text.num_layers} layers"
    yield Measured("model", f"{target.config.family}, {params}")
    tokenizer: Any = AutoTokenizer.from_pretrained(target.hf_dir)
    yield tokenizer_line(target, tokenizer)
    yield template_line(target, tokenizer)
    yield processor_line(target)


def tokenizer_line(target: Target, tokenizer: Any) -> Measured:
    chat = target.chat
    other = [text for text in HARD_TEXTS if chat.encode(text).tolist() != _ids(tokenizer, text)]
    problem = f"{len(other)} of {len(HARD_TEXTS)} texts differ, for example {other[0]!r}" if other else ""
    return Measured("tokenizer = transformers'", f"{len(HARD_TEXTS)} texts", problem=problem)


def _ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def template_line(target: Target, tokenizer: Any) -> Measured:
    """Compares chat templates. If a template ignores tools, both sides get the tools as text."""
    messages = main_messages(Prompts(), [("video.mp4", 64.0, [0.0, 12.5])], "What? Größe 你好", 5)
    settings: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    text = tokenizer.apply_chat_template(messages, tools=[CROP_VIDEO_SCHEMA], **settings)
    if CROP_VIDEO_SCHEMA["function"]["description"][:20] not in text:
        text = tokenizer.apply_chat_template(with_tools(messages, [CROP_VIDEO_SCHEMA]), **settings)
    ids = target.chat.prompt(messages, [CROP_VIDEO_SCHEMA])
    problem = "" if ids.tolist() == _ids(tokenizer, text) else "the ids of a prompt with tools differ"
    return Measured("chat template with a tool = transformers'", f"{len(ids)} tokens", problem=problem)


def processor_line(target: Target) -> Measured:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (*size_px, 3), np.uint8) for size_px in SIZES_PX]
    theirs = Qwen2VLImageProcessorPil.from_pretrained(target.hf_dir)(images=pictures, return_tensors="np")
    patches, grids = process_images(pictures, VisionContract.from_hf(target.hf_dir))
    if not np.array_equal(grids, np.asarray(theirs["image_grid_thw"])):
        return Measured("processor = transformers'", problem="pictures get other sizes")
    difference = np.abs(patches - np.asarray(theirs["pixel_values"])).max()
    return Measured("processor = transformers', largest difference", float(difference), 0.0)
