"""Turns episodes into dialogues: expanded token ids, and an advantage and a class for every sampled token.

Rewards are assigned to characters, gradients to tokens: a token is structural if it spells any character of a
structural tag, even if it also spells neighboring characters.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from model_port.inputs import NOT_REPLAYED
from paravt_jax.learner.advantages import EpisodeAdvantage, token_advantages
from paravt_jax.learner.packing import Dialogue
from paravt_jax.rewards.grammar import Place, Tag
from paravt_jax.rewards.terms import AnchorProperty, RewardTerms
from rollout.chat import Chat
from rollout.ledger import Ledger
from rollout.records import Episode

OPENED_BY_MODEL = ("tool_call", "answer")  # `<think>` is usually rollout.forced_prefix

# Token classes of the mismatch metrics.
PLAIN, STRUCTURAL, FIRST_OF_TURN = range(3)
CLASSES = ("plain", "structural", "first_of_turn")


def dialogues_of(
    episode: Episode,
    number: int,
    earned: EpisodeAdvantage,
    terms: RewardTerms,
    chat: Chat,
    *,
    subagent_loss: bool = False,
) -> list[Dialogue]:
    """Makes the main agent's dialogue and, with `subagent_loss`, its sub-agents'; only dialogues with loss tokens."""
    structural = struct_mask(episode, terms.tags, chat)
    main = main_advantages(episode, earned, terms, structural, chat)
    dialogues = [dialogue_of(episode.ledger, number, main, structural, chat, earned.likelihood)]
    for ledger in episode.ledgers[1:] if subagent_loss else []:
        zeros = np.zeros(len(ledger.ids))
        advantage = token_advantages(earned.sequence, zeros, ledger.sampled_mask)
        dialogues.append(dialogue_of(ledger, number, advantage, zeros > 0, chat))
    return [dialogue for dialogue in dialogues if dialogue.loss_mask.any()]


def main_advantages(
    episode: Episode, earned: EpisodeAdvantage, terms: RewardTerms, structural: Bool[np.ndarray, " n"], chat: Chat
) -> Float[np.ndarray, " n"]:
    """The advantage of each token of the main agent."""
    anchor = np.where(structural, earned.anchor, 0.0)
    for credit in terms.anchors:
        if credit.name in earned.properties:
            anchor = anchor + earned.properties[credit.name] * property_mask(episode, credit, structural, chat)
    return token_advantages(earned.sequence, anchor, episode.ledger.sampled_mask)


def advantage_places(episode: Episode, advantage: Float[np.ndarray, " n"], chat: Chat) -> Iterator[tuple[Place, float]]:
    """Yields spans of characters with a nonzero advantage; adjacent tokens of equal advantage share a span."""
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


def struct_mask(episode: Episode, tags: Sequence[Tag], chat: Chat) -> Bool[np.ndarray, " n"]:
    """struct(o): the main agent's sampled tokens of closing tags, of opening tags but `<think>`, and of turn ends."""
    places = [tag.place for tag in tags if tag.closing or tag.name in OPENED_BY_MODEL]
    places += [Place(number, len(turn.text), len(turn.text)) for number, turn in enumerate(episode.turns)]
    return token_mask(episode, places, chat)


def property_mask(
    episode: Episode, earned: AnchorProperty, structural: Bool[np.ndarray, " n"], chat: Chat
) -> Bool[np.ndarray, " n"]:
    """The tokens that a property credits: the structural tokens at its places if the property is met.

    If it is not met, the tokens at its faults; none for a turn that was cut off there.
    """
    mask = token_mask(episode, earned.places, chat)
    return mask & structural if earned.met else mask


def token_mask(episode: Episode, places: Sequence[Place], chat: Chat) -> Bool[np.ndarray, " n"]:
    """The sampled tokens that spell any character of these places; an empty place means the end of its turn."""
    ids = episode.ledger.ids
    mask = np.zeros(len(ids), bool)
    for number, turn in enumerate(episode.turns):
        begin, end = turn.token_span
        of_turn = [each.span for each in places if each.turn == number]
        for token, (first, last) in enumerate(chat.spans(ids[begin:end]) if of_turn else ()):
            mask[begin + token] = any(first < stop and last > start for start, stop in of_turn)
        if any(start == stop for start, stop in of_turn) and int(ids[end - 1]) in chat.stop_ids:
            mask[end - 1] = True
    return mask & episode.ledger.sampled_mask


def dialogue_of(
    ledger: Ledger,
    number: int,
    advantage: Float[np.ndarray, " n"],
    structural: Bool[np.ndarray, " n"],
    chat: Chat,
    likelihood: float = 0.0,
) -> Dialogue:
    """Makes one agent's dialogue with expanded placeholders; sampled tokens are loss tokens.

    `likelihood` weighs the log-likelihood of structural tokens.
    """
    ids, sampled = ledger.ids, ledger.sampled_mask
    # The dialogue ends after a sampled placeholder, because no frame belongs to it and no engine accepts it as input.
    # It also ends after the last sampled token: later tokens have no loss, and may not fit into any row.
    wrong = np.flatnonzero(sampled & np.isin(ids, list(chat.visual_ids)))
    end = int((*wrong[:1], *np.flatnonzero(sampled)[-1:], -1)[0]) + 1
    frames = (ids == chat.image_id) & ~sampled
    repeats = ledger.num_tokens_each(chat.image_id, chat.token_px)
    prompt = ledger.segments[0]
    return Dialogue(
        ids=np.repeat(ids[:end], repeats[:end]),
        frames=tuple(picture.key for picture in ledger.pictures)[: int(frames[:end].sum())],
        num_shared=int(repeats[: len(prompt.ids)].sum()),
        num_shared_frames=len(prompt.pictures),
        loss_mask=np.repeat(sampled[:end], repeats[:end]),
        behavior_logp=np.repeat(ledger.behavior_logp[:end], repeats[:end]),
        advantage=np.repeat(advantage[:end], repeats[:end]),
        token_class=np.repeat(_classes(ledger, structural)[:end], repeats[:end]),
        episode=number,
        likelihood=np.repeat(np.where(structural, np.float32(likelihood), 0)[:end], repeats[:end]),
        experts=_experts(ledger, int(repeats[:end].sum())),
    )


def _experts(ledger: Ledger, num_tokens: int) -> Int[np.ndarray, "n L J"] | None:
    """The experts that computed each token; the last token has none, because it was never an input."""
    if ledger.experts is None:
        return None
    known = ledger.experts[:num_tokens]
    return np.pad(known, ((0, num_tokens - len(known)), (0, 0), (0, 0)), constant_values=NOT_REPLAYED)


def _classes(ledger: Ledger, structural: np.ndarray) -> Int[np.ndarray, " n"]:
    classes = np.where(structural, STRUCTURAL, PLAIN).astype(np.int32)
    begin, previous = 0, ""
    for segment in ledger.segments:
        # A new policy version starts a new segment within the same turn.
        if segment.kind == "sampled" and previous != "sampled":
            classes[begin] = FIRST_OF_TURN
        begin, previous = begin + len(segment.ids), segment.kind
    return classes
