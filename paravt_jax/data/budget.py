"""With how many frames a prompt is shown on a visit: nFrames gating, K ~ Uniform(frame_budgets).

A draw is a hash of what it is for. It has no state, so it is the same in a re-run, on every host and after a resume,
and does not depend on which draws were made before. With 64 bits of hash the modulus favours no budget by more than
one part in 2^61.
"""

from collections.abc import Hashable, Sequence

from paravt_jax.config import VideoConfig
from paravt_jax.data.sample_order import Item, PromptSample
from rollout.seeds import derived_seed


def frame_budget(seed: int, epoch: int, prompt_id: str, budgets: Sequence[int]) -> int:
    return budgets[derived_seed("frame budget", seed, epoch, prompt_id) % len(budgets)]


def stratified_budgets(seed: int, step_key: Hashable, num: int, budgets: Sequence[int]) -> list[int]:
    """`num` draws in which no budget comes up more than once oftener than another.

    Which ones come up oftener, and where each stands, is drawn; `step_key` is known by its repr.
    """
    rounds, num_left = divmod(num, len(budgets))
    left = _shuffled(budgets, "budgets left over", seed, step_key)[:num_left]
    return _shuffled([*budgets] * rounds + left, "order of budgets", seed, step_key)


def budgets_of(visits: Sequence[PromptSample[Item]], video: VideoConfig, seed: int) -> list[int]:
    """The frame budget of each visit of a step, whatever their order in it."""
    if not video.gating:
        budgets = [video.overview_frames] * len(visits)
    elif not video.stratified:
        budgets = [frame_budget(seed, visit.epoch, visit.item.id, video.frame_budgets) for visit in visits]
    else:
        keys = [(visit.epoch, visit.item.id) for visit in visits]
        drawn = stratified_budgets(seed, tuple(sorted(keys)), len(keys), video.frame_budgets)
        by_key = dict(zip(sorted(keys), drawn, strict=True))
        budgets = [by_key[key] for key in keys]
    # An overview shows at least a frame of every video; to refuse such a prompt would end the run at a random step.
    return [max(budget, len(visit.item.videos)) for budget, visit in zip(budgets, visits, strict=True)]


def _shuffled(values: Sequence[int], *key: Hashable) -> list[int]:
    places = sorted(range(len(values)), key=lambda place: derived_seed(*key, place))
    return [values[place] for place in places]
