"""The number of video frames in a prompt: nFrames gating, K ~ Uniform(frame_budgets).

Each draw is a hash of its key, without state. So it is the same in a re-run, on every host and after a resume, and does
not depend on other draws. With 64 bits of hash the modulus favors no budget by more than one part in 2^61.
"""

from collections.abc import Sequence

from paravt_jax.config import VideoConfig
from paravt_jax.data.sample_order import Item, PromptSample
from rollout.seeds import derived_seed


def frame_budget(seed: int, epoch: int, prompt_id: str, budgets: Sequence[int]) -> int:
    return budgets[derived_seed("frame budget", seed, epoch, prompt_id) % len(budgets)]


def budgets_of(samples: Sequence[PromptSample[Item]], video: VideoConfig, seed: int) -> list[int]:
    """The frame budget of each sample of a step; their order does not matter."""
    if video.gating:
        budgets = [frame_budget(seed, each.epoch, each.item.id, video.frame_budgets) for each in samples]
    else:
        budgets = [video.overview_frames] * len(samples)
    # An overview has at least one frame of every video. Rejecting the prompt would end the run at a random step.
    return [max(budget, len(each.item.videos)) for budget, each in zip(budgets, samples, strict=True)]
