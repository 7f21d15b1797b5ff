"""Episodes as the learner takes them: ids expanded, and every sampled token with its advantage and its class.

A reward belongs to characters, the gradient to tokens: a token that spells any character of a structural tag counts as
structural, also when it spells some of its neighbour too.
"""

import itertools
from collections.abc import Collection, Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from paravt_jax.learner.advantages import EpisodeAdvantage, token_advantages
from paravt_jax.learner.packing import Dialogue
from paravt_jax.learner.settings import ANCHORS, Anchor
from paravt_jax.rewards.grammar import Place, Tag
from paravt_jax.rewards.terms import AnchorProperty, RewardTerms
from rollout.chat import Chat
from rollout.episode import Episode, Turn
from rollout.ledger import Ledger

OPENED_BY_MODEL = ("tool_call", "answer")  # `<think>` is forced, never sampled

# Classes of tokens, by which the mismatch between engine and learner is watched.
PLAIN, STRUCTURAL, FIRST_OF_TURN = range(3)
CLASSES = ("plain", "structural", "first_of_turn")


def dialogues_of(
    episode: Episode,
    number: int,
    earned: EpisodeAdvantage,
    terms: RewardTerms,
    chat: Chat,
    token_px: int,
    *,
    anchors: Collection[Anchor] = ANCHORS,
    subagent_loss: bool = False,
) -> list[Dialogue]:
    """The main agent's dialogue, and with `subagent_loss` those of its sub-agents; each at least one sampled token."""
    structural = struct_mask(episode, terms.tags, chat, anchors)
    main = main_advantages(episode, earned, terms, structural, chat)
    dialogues = [dialogue_of(episode.ledger, number, main, structural, chat, token_px)]
    for ledger in episode.ledgers[1:] if subagent_loss else []:
        nothing = np.zeros(len(ledger.ids))
        advantage = token_advantages(earned.sequence, nothing, ledger.sampled_mask)
        dialogues.append(dialogue_of(ledger, number, advantage, nothing > 0, chat, token_px))
    return [dialogue for dialogue in dialogues if dialogue.loss_mask.any()]


def main_advantages(
    episode: Episode, earned: EpisodeAdvantage, terms: RewardTerms, structural: Bool[np.ndarray, " n"], chat: Chat
) -> Float[np.ndarray, " n"]:
    """Of each id of the main agent."""
    anchor = np.where(structural, earned.anchor, 0.0)
    for one in terms.anchors:
        if one.name in earned.properties:
            anchor = anchor + earned.properties[one.name] * property_mask(episode, one, structural, chat)
    return token_advantages(earned.sequence, anchor, episode.ledger.sampled_mask)


def advantage_places(episode: Episode, advantage: Float[np.ndarray, " n"], chat: Chat) -> Iterator[tuple[Place, float]]:
    """The same in characters: wherever it is not 0, neighbours of one advantage together."""
    ids = episode.ledger.ids
    for number, turn in enumerate(episode.turns):
        begin, end = turn.token_span
        length = len(turn.text)
        spans = [(min(start, length), min(stop, length)) for start, stop in chat.spans(ids[begin:end])]
        tokens = [
            (value, span[0] == length, span) for value, span in zip(advantage[begin:end].tolist(), spans, strict=True)
        ]
        for (value, _), alike in itertools.groupby(tokens, lambda token: token[:2]):
            places = [span for *_, span in alike]
            if value:
                yield Place(number, places[0][0], places[-1][1]), value


def struct_mask(
    episode: Episode, tags: Sequence[Tag], chat: Chat, anchors: Collection[Anchor] = ANCHORS
) -> Bool[np.ndarray, " n"]:
    """struct(o): the sampled tokens of the main agent that spell a selected tag, or end a turn."""
    places = [tag.place for tag in tags if _selected(tag, anchors)]
    if "turn_end" in anchors:
        places += [Place(number, len(turn.text), len(turn.text)) for number, turn in enumerate(episode.turns)]
    return token_mask(episode, places, chat)


def property_mask(
    episode: Episode, earned: AnchorProperty, structural: Bool[np.ndarray, " n"], chat: Chat
) -> Bool[np.ndarray, " n"]:
    """The tokens that answer for a property: where it is met, the structural ones of its places.

    Where it is not, the one that stands in its place, whatever it is; none where the turn was cut off there.
    """
    mask = token_mask(episode, earned.places, chat)
    return mask & structural if earned.met else mask


def token_mask(episode: Episode, places: Sequence[Place], chat: Chat) -> Bool[np.ndarray, " n"]:
    """The sampled tokens that spell any character of these places, or end a turn where a place is its end."""
    ids = episode.ledger.ids
    mask = np.zeros(len(ids), bool)
    for number, turn in enumerate(episode.turns):
        begin, end = turn.token_span
        of_turn = [place.span for place in places if place.turn == number]
        for token, (first, last) in enumerate(chat.spans(ids[begin:end]) if of_turn else ()):
            mask[begin + token] = any(first < stop and last > start for start, stop in of_turn)
        if any(start == stop for start, stop in of_turn) and _ends(turn, ids, chat):
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
    ledger: Ledger,
    number: int,
    advantage: Float[np.ndarray, " n"],
    structural: Bool[np.ndarray, " n"],
    chat: Chat,
    token_px: int,
) -> Dialogue:
    """One agent's dialogue, placeholders expanded; its sampled tokens are those to learn from."""
    ids, sampled = ledger.ids, ledger.sampled_mask
    # A placeholder that the policy sampled is learnt from, but nothing behind it, since it shows nothing and no engine
    # takes it back as a token. Nor is what follows the last sampled token, and what others say there may be longer than
    # any row.
    wrong = np.flatnonzero(sampled & np.isin(ids, list(chat.visual_ids)))
    end = int((*wrong[:1], *np.flatnonzero(sampled)[-1:], -1)[0]) + 1
    shown = (ids == chat.image_id) & ~sampled
    repeats = ledger.num_tokens_each(chat.image_id, token_px)
    prompt = ledger.segments[0]
    return Dialogue(
        ids=np.repeat(ids[:end], repeats[:end]),
        frames=tuple(picture.key for picture in ledger.pictures)[: int(shown[:end].sum())],
        num_shared=int(repeats[: len(prompt.ids)].sum()),
        num_shared_frames=len(prompt.pictures),
        loss_mask=np.repeat(sampled[:end], repeats[:end]),
        behavior_logp=np.repeat(ledger.behavior_logp[:end], repeats[:end]),
        advantage=np.repeat(advantage[:end], repeats[:end]),
        token_class=np.repeat(_classes(ledger, structural)[:end], repeats[:end]),
        episode=number,
    )


def _classes(ledger: Ledger, structural: np.ndarray) -> Int[np.ndarray, " n"]:
    classes = np.where(structural, STRUCTURAL, PLAIN).astype(np.int32)
    begin, before = 0, ""
    for segment in ledger.segments:
        # A turn goes on where the policy that samples it is another.
        if segment.kind == "sampled" and before != "sampled":
            classes[begin] = FIRST_OF_TURN
        begin, before = begin + len(segment.ids), segment.kind
    return classes
