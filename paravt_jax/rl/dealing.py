"""Scatters work over hosts and gathers the results on all of them: all but pixels, which only their own host needs.

So every host knows the whole step and judges it as one host would; only packing and computing are its own.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import PromptSample
from paravt_jax.learner.advantages import GroupAdvantages
from paravt_jax.rewards.grammar import Place, Tag
from paravt_jax.rewards.terms import AnchorProperty, Credit, OwnTerm, RewardTerms, Summand
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.wire import Form, Wire
from rollout.ledger import Ledger, Segment
from rollout.picture import Picture
from rollout.prompter import ShownVideo, Task
from rollout.records import Call, Episode, Turn
from rollout.tools import ToolCall, Window
from rollout.video.box import Box

Item = TypeVar("Item")
Result = TypeVar("Result")

RECORDS = (  # what the results of an episode consist of
    *(PromptSample, Prompt, GroupAdvantages, RewardTerms, Summand, AnchorProperty, OwnTerm, Credit, Place, Tag),
    *(Episode, Task, ShownVideo, Turn, Call, Window, Box, Segment),
)
FORMS = {
    Ledger: Form(lambda ledger: (ledger.segments,), Ledger),
    Picture: Form(lambda it: (it.key, *it.size_px), lambda key, *size_px: Picture.without_pixels(key, size_px)),
    ToolCall: Form(lambda call: (call.span, call.name), ToolCall),  # arguments may be anything that a model wrote
}


async def dealt(
    hosts: Hosts,
    stream: str,
    items: Sequence[Item],
    work: Callable[[Sequence[Item]], Awaitable[list[Result]]],
    results: Sequence[type] = (),
) -> list[Result]:
    """What `work` makes of all items, in their order; each host works on every `hosts.num`th of them.

    `results` are the classes of the results, beside those of episodes.
    """
    own = await work(items[hosts.index :: hosts.num])
    if hosts.num == 1:
        return own
    told = await hosts.gathered(stream, own, Wire((*RECORDS, *results), FORMS))
    return [told[place % hosts.num][place // hosts.num] for place in range(len(items))]
