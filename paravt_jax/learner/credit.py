"""Episodes as the learner takes them: ids expanded, and every sampled token with its advantage and its class.

A reward belongs to characters, the gradient to tokens: a token that spells any character of a structural tag counts as
structural, also when it spells some of its neighbour too.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from paravt_jax.learner.advantages import token_advantages
from paravt_jax.learner.packing import Dialogue
from paravt_jax.learner.settings import ANCHORS, Anchor
from paravt_jax.rewards.terms import Tag
from rollout.chat import Chat
from rollout.episode import Episode, Turn
from rollout.ledger import Ledger

OPENED_BY_MODEL = ("tool_call", "answer")  # `<think>` is forced, never sampled

# Classes of tokens, by which the mismatch between engine and learner is watched.
PLAIN, STRUCTURAL, FIRST_OF_TURN, FIRST_AFTER_IMAGE = range(4)
CLASSES = ("plain", "structural", "first_of_turn", "first_after_image")


@dataclass(frozen=True)
class EpisodeAdvantage:
    """What an episode earned relative to its group: for every sampled token, and more for structural ones."""

    sequence: float
    anchor: float = 0.0


def dialogues_of(
    episode: Episode,
    number: int,
    earned: EpisodeAdvantage,
    tags: Sequence[Tag],
    chat: Chat,
    token_px: int,
    *,
    anchors: Collection[Anchor] = ANCHORS,
    subagent_loss: bool = False,
) -> list[Dialogue]:
    """The main agent's dialogue, and with `subagent_loss` those of its sub-agents; each at least one sampled token."""
    structural = struct_mask(episode, tags, chat, anchors)
    ledgers = episode.ledgers if subagent_loss else [episode.ledger]
    masks = [structural, *(np.zeros(len(ledger.ids), bool) for ledger in ledgers[1:])]
    dialogues = [
        dialogue_of(ledger, number, earned, mask, chat, token_px) for ledger, mask in zip(ledgers, masks, strict=True)
    ]
    return [dialogue for dialogue in dialogues if dialogue.loss_mask.any()]


def struct_mask(
    episode: Episode, tags: Sequence[Tag], chat: Chat, anchors: Collection[Anchor] = ANCHORS
) -> Bool[np.ndarray, " n"]:
    """struct(o): the sampled tokens of the main agent that spell a selected tag, or end a turn."""
    ids = episode.ledger.ids
    mask = np.zeros(len(ids), bool)
    for number, turn in enumerate(episode.turns):
        begin, end = turn.token_span
        spans = chat.spans(ids[begin:end])
        for tag in tags:
            if tag.turn == number and _selected(tag, anchors):
                start, stop = tag.span
                mask[begin:end] |= [first < stop and last > start for first, last in spans]
        if "turn_end" in anchors and _ends(turn, ids, chat):
            mask[end - 1] = True
    return mask & episode.ledger.sampled_mask


def _selected(tag: Tag, anchors: Collection[Anchor]) -> bool:
    if tag.closing:
        return "closings" in anchors
    return "openings" in anchors and tag.name in OPENED_BY_MODEL


def _ends(turn: Turn, ids: np.ndarray, chat: Chat) -> bool:
    begin, end = turn.token_span
    return end > begin and int(ids[end - 1]) in chat.stop_ids


def dialogue_of(
    ledger: Ledger, number: int, earned: EpisodeAdvantage, structural: np.ndarray, chat: Chat, token_px: int
) -> Dialogue:
    """One agent's dialogue, placeholders expanded; its sampled tokens are those to learn from."""
    ids, sampled = ledger.ids, ledger.sampled_mask
    # A placeholder that the policy sampled shows nothing, and nothing after it can be computed as the engine did; what
    # follows the last sampled token teaches nothing, and what others say there may be longer than any row.
    wrong = np.flatnonzero(sampled & np.isin(ids, list(chat.visual_ids)))
    ends = (*wrong[:1], *(np.flatnonzero(sampled)[-1:] + 1), 0)
    end = int(ends[0])
    shown = ids == chat.image_id
    repeats = ledger.num_tokens_each(chat.image_id, token_px)
    advantage = token_advantages(earned.sequence, earned.anchor, sampled, structural)
    prompt = ledger.segments[0]
    return Dialogue(
        ids=np.repeat(ids[:end], repeats[:end]),
        frames=tuple(picture.key for picture in ledger.pictures)[: int((shown & ~sampled)[:end].sum())],
        num_shared=int(repeats[: len(prompt.ids)].sum()),
        num_shared_frames=len(prompt.pictures),
        loss_mask=np.repeat(sampled[:end], repeats[:end]),
        behavior_logp=np.repeat(ledger.behavior_logp[:end], repeats[:end]),
        advantage=np.repeat(advantage[:end], repeats[:end]),
        token_class=np.repeat(_classes(ledger, structural, shown)[:end], repeats[:end]),
        episode=number,
    )


def _classes(ledger: Ledger, structural: np.ndarray, shown: np.ndarray) -> Int[np.ndarray, " n"]:
    classes = np.where(structural, STRUCTURAL, PLAIN).astype(np.int32)
    begin = 0
    for segment in ledger.segments:
        if segment.kind == "sampled" and len(segment.ids):
            classes[begin] = FIRST_OF_TURN
        begin += len(segment.ids)
    classes[1:][shown[:-1]] = FIRST_AFTER_IMAGE
    return classes
