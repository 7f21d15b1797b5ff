"""Makes the prompts for both sides: text, a video with a crop, and the recipe's own prompt."""

import asyncio

import numpy as np

from model_port.processing import expand_placeholders, process_images, settled_size, token_counts
from model_port.reference import ProcessedPrompt
from model_port.verify import QUESTION, video_prompt
from paravt_jax.check.target import Target
from rollout.check import TestCard
from rollout.prompter import Overview, Task

VIDEO_FRAMES, VIDEO_PX = 8, (320, 352)  # 110 tokens per frame with patches of 16 px
CARD_PX = (720, 1280)


def text_prompt(target: Target) -> ProcessedPrompt:
    ids = target.chat.prompt([{"role": "user", "content": QUESTION}])
    return ProcessedPrompt.of_text(ids.astype(np.int64), target.config)


def video_of(target: Target) -> ProcessedPrompt:
    return video_prompt(target.hf_dir, VIDEO_FRAMES, VIDEO_PX)


def overview_of(target: Target, num_frames: int) -> Overview:
    """The main agent's overview of a test-card video, by the recipe."""
    card = TestCard(settled_size(*CARD_PX, target.contract))
    prompter = target.run_config.rollout.prompter(card, target.chat)
    return asyncio.run(prompter.overview(Task("card", QUESTION, ("card.mp4",), num_frames)))


def processed(target: Target, overview: Overview) -> ProcessedPrompt:
    pixels, grids = process_images([picture.pixels for picture in overview.pictures], target.contract)
    counts = token_counts(grids, target.config.vision.merge)
    ids = expand_placeholders(overview.ids.astype(np.int64), counts, target.config.image_token_id)
    return ProcessedPrompt(ids, pixels, grids)


def prompts_of(target: Target) -> dict[str, ProcessedPrompt]:
    num_frames = target.run_config.video.most_frames
    return {
        "text": text_prompt(target),
        f"video of {VIDEO_FRAMES} frames": video_of(target),
        f"recipe's prompt, {num_frames} frames": processed(target, overview_of(target, num_frames)),
    }
