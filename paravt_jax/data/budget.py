"""The number of frames for each prompt sample: nFrames gating, K ~ Uniform(frame_budgets).

A draw is a hash of the seed, the epoch and the prompt, so it needs no state: it is the same after a resume, on every
host, and in any order. With 64 bits of hash, the modulus favors no budget by more than one part in 2^61.
"""

from collections.abc import Sequence

from paravt_jax.config import VideoConfig
from paravt_jax.data.sample_order import Item, PromptSample
from rollout.seeds import derived_seed


def frame_budget(seed: int, epoch: int, prompt_id: str, budgets: Sequence[int]) -> int:
    return budgets[derived_seed("frame budget", seed, epoch, prompt_id) % len(budgets)]


def budgets_of(samples: Sequence[PromptSample[Item]], video: VideoConfig, seed: int) -> list[int]:
    budgets = [video.overview_frames] * len(samples)
    if video.frame_budgets:
        budgets = [frame_budget(seed, sample.epoch, sample.item.id, video.frame_budgets) for sample in samples]
    return [shown_frames(budget, sample.item.videos) for budget, sample in zip(budgets, samples, strict=True)]


def shown_frames(budget: int, videos: Sequence[str]) -> int:
    """The number of overview frames of a question: at least one per video; 0 without a video."""
    return max(budget, len(videos)) if videos else 0
