"""With how many frames a prompt is shown on a visit: nFrames gating, K ~ Uniform(frame_budgets).

A draw is a hash of what it is for. It has no state, so it is the same in a re-run, on every host and after a resume,
and does not depend on which draws were made before. With 64 bits of hash the modulus favours no budget by more than
one part in 2^61.
"""

from collections.abc import Sequence

from paravt_jax.config import VideoConfig
from paravt_jax.data.sample_order import Item, PromptSample
from rollout.seeds import derived_seed


def frame_budget(seed: int, epoch: int, prompt_id: str, budgets: Sequence[int]) -> int:
    return budgets[derived_seed("frame budget", seed, epoch, prompt_id) % len(budgets)]


def budgets_of(visits: Sequence[PromptSample[Item]], video: VideoConfig, seed: int) -> list[int]:
    """The frame budget of each visit of a step, whatever their order in it."""
    if video.gating:
        budgets = [frame_budget(seed, visit.epoch, visit.item.id, video.frame_budgets) for visit in visits]
    else:
        budgets = [video.overview_frames] * len(visits)
    # An overview shows at least a frame of every video; to refuse such a prompt would end the run at a random step.
    return [max(budget, len(visit.item.videos)) for budget, visit in zip(budgets, visits, strict=True)]
