"""EpisodeAdvantage for characters lands on the tokens that spell them, and on sampled ones only."""

import asyncio

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from qwen_tokenizer import qwen_tokenizer

from model_port.chat_template import CHAT_TEMPLATE
from model_port.processing import expand_placeholders
from model_port.tiny import tiny_tokenizer
from paravt_jax.learner.advantages import EpisodeAdvantage, group_advantages, group_rewards
from paravt_jax.learner.credit import CLASSES, FIRST_OF_TURN, PLAIN, dialogues_of, struct_mask
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.terms import reward_terms
from rollout.chat import Chat
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Segment
from rollout.prompter import Task

TURNS = [f"I look at it.</think>\n\n{call(3, 9)}<|im_end|>", "It is red.</think><answer>A</answer><|im_end|>"]
TOKEN_PX = 32


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def chat(request):
    return Chat({"tiny": tiny_tokenizer, "qwen": qwen_tokenizer}[request.param](), CHAT_TEMPLATE)


def play(chat, turns=TURNS, **config):
    agent = Agent(script(chat, turns), FakeFrames(size_px=(64, 96)), chat, EpisodeConfig(**config))

    async def run():
        return await agent.run(await agent.overview(Task("t", "What colour?", ("/a.mp4",), 4)))

    episode = asyncio.run(run())
    terms = reward_terms([turn.text for turn in episode.turns], episode.outcomes, "A", "mcq")
    return episode, terms


def spelled(chat, episode, mask) -> list[str]:
    """The text of each run of masked tokens."""
    ids = episode.ledger.ids
    runs = np.split(np.flatnonzero(mask), np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1)
    return [chat.decode(ids[run]) for run in runs if len(run)]


def test_structural_tokens_spell_the_tags(chat):
    episode, terms = play(chat)
    found = spelled(chat, episode, struct_mask(episode, terms.tags, chat))
    assert found[0] == "</think>"
    assert found[1] == "<tool_call>"
    assert found[2] == "</tool_call><|im_end|>"
    # `<answer>` is spelled with ordinary tokens, and the last one of a tag may spell its neighbour too.
    assert found[3].startswith("</think><answer>")
    assert found[-1].endswith("</answer><|im_end|>")


def test_the_forced_prefix_and_what_the_environment_says_earn_nothing(chat):
    episode, terms = play(chat)
    mask = struct_mask(episode, terms.tags, chat)
    begin = 0
    for segment in episode.ledger.segments:
        if segment.kind != "sampled":
            assert not mask[begin : begin + len(segment.ids)].any()
        begin += len(segment.ids)


def test_every_sampled_token_has_the_credit_of_its_episode_and_structural_ones_more(chat):
    episode, terms = play(chat)
    (dialogue,) = dialogues_of(episode, 3, EpisodeAdvantage(0.5, 0.25), terms, chat, TOKEN_PX)
    structural = struct_mask(episode, terms.tags, chat)[_sampled(episode)]
    np.testing.assert_allclose(dialogue.advantage[dialogue.loss_mask], 0.5 + 0.25 * structural)
    np.testing.assert_array_equal(dialogue.ids[dialogue.loss_mask], episode.ledger.ids[_sampled(episode)])
    assert dialogue.loss_mask.sum() == episode.ledger.num_sampled
    assert dialogue.episode == 3
    assert set(dialogue.behavior_logp[dialogue.loss_mask].tolist()) == {-0.5}


def _sampled(episode):
    return np.concatenate([np.full(len(s.ids), s.kind == "sampled") for s in episode.ledger.segments])


def test_placeholders_are_expanded_as_the_model_does(chat):
    episode, terms = play(chat)
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat, TOKEN_PX)
    counts = [6] * len(episode.ledger.pictures)
    np.testing.assert_array_equal(dialogue.ids, expand_placeholders(episode.ledger.ids, counts, chat.image_id))
    assert dialogue.frames == tuple(picture.key for picture in episode.ledger.pictures)
    assert dialogue.num_shared == len(episode.ledger.segments[0].ids) + 5 * len(counts)


def test_members_of_a_group_share_their_prompt(chat):
    one, two = (
        dialogues_of(episode, n, EpisodeAdvantage(1.0), terms, chat, TOKEN_PX)[0]
        for n, (episode, terms) in enumerate([play(chat), play(chat, [ANSWER])])
    )
    assert one.shared == two.shared


def test_a_sampled_placeholder_is_the_last_token_that_is_learnt_from(chat):
    episode, terms = play(chat, ["One <|image_pad|> two.</think><|im_end|>"])
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(-1.0), terms, chat, TOKEN_PX)
    assert chat.decode(dialogue.ids[dialogue.loss_mask]) == "One <|image_pad|>"
    assert dialogue.loss_mask[-1] and dialogue.advantage[-1] == -1 and dialogue.behavior_logp[-1] == -0.5
    assert len(dialogue.ids) == len(dialogue.loss_mask) == len(dialogue.advantage)
    assert len(dialogue.frames) == len(episode.ledger.pictures)


def test_what_follows_the_last_sampled_token_is_left_out(chat):
    episode, terms = play(chat, [TURNS[0], "I was cut off"])
    episode.ledger.add("environment", chat.encode("A very long response. " * 100))
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat, 32)
    assert dialogue.loss_mask[-1] and dialogue.loss_mask.sum() == episode.ledger.num_sampled


def test_sub_agents_learn_only_when_asked_to(chat):
    episode, terms = play(chat)
    assert len(dialogues_of(episode, 0, EpisodeAdvantage(0.5, 0.25), terms, chat, TOKEN_PX)) == 1
    _, report = dialogues_of(episode, 0, EpisodeAdvantage(0.5, 0.25), terms, chat, TOKEN_PX, subagent_loss=True)
    assert chat.decode(report.ids[report.loss_mask]) == "A report.<|im_end|>"
    assert set(report.advantage[report.loss_mask].tolist()) == {0.5}


def test_classes_name_where_a_mismatch_would_show(chat):
    episode, terms = play(chat)
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat, TOKEN_PX)
    classes = dialogue.token_class[dialogue.loss_mask]
    assert np.count_nonzero(classes == FIRST_OF_TURN) == 2
    assert set(classes.tolist()) == set(range(len(CLASSES)))
    assert (classes == PLAIN).any()


def test_a_turn_begins_once_though_other_weights_go_on_with_it(chat):
    episode, terms = play(chat)
    before = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat, TOKEN_PX)[0]
    number, whole = next((n, s) for n, s in enumerate(episode.ledger.segments) if s.kind == "sampled")
    first, then = (
        Segment("sampled", whole.ids[part], (), whole.behavior_logp[part], version)
        for part, version in ((slice(3), 1), (slice(3, None), 2))
    )
    episode.ledger.segments[number : number + 1] = [first, then]
    after = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat, TOKEN_PX)[0]
    np.testing.assert_array_equal(after.token_class, before.token_class)


@pytest.fixture(autouse=True)
def negligible_epsilon(monkeypatch):
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 1e-12)


GOOD = "I look at it.</think><answer>A</answer><|im_end|>"
UNCLOSED = GOOD.replace("</think>", "")


def taught(chat, said, credit, **config):
    """The advantage of every sampled token of each member of a group, by the text that it spells."""
    played = [play(chat, [text], **config) for text in said]
    settings = AdvantageConfig(credit=credit)
    group = group_advantages(group_rewards([terms for _, terms in played], anchor_scale=0.5, config=settings), settings)
    for number, (episode, terms) in enumerate(played):
        (dialogue,) = dialogues_of(episode, number, group.of(number), terms, chat, TOKEN_PX)
        yield [
            (chat.decode([token]), advantage)
            for token, advantage in zip(
                dialogue.ids[dialogue.loss_mask], dialogue.advantage[dialogue.loss_mask], strict=True
            )
        ]


def spelling(tokens, text):
    """The advantages of the tokens that spell the last such text of a turn."""
    whole = "".join(piece for piece, _ in tokens)
    start, at = whole.rindex(text), 0
    for piece, advantage in tokens:
        if at < start + len(text) and at + len(piece) > start:
            yield float(advantage)
        at += len(piece)


EIGHT = [GOOD] * 5 + [UNCLOSED] * 3
PROSE, PUNISHED = pytest.approx(-1.29, abs=5e-3), pytest.approx(-1.94, abs=5e-3)  # −√(5/3), and half of it more


def test_as_one_for_all_tags_the_anchor_punishes_those_that_are_right(chat):
    unclosed = [*taught(chat, EIGHT, "token")][-1]
    for tag in ("<answer>", "</answer>", "<|im_end|>"):
        assert PUNISHED in [*spelling(unclosed, tag)]
    assert all(advantage == PROSE for advantage in spelling(unclosed, "look"))


def test_by_span_only_what_stands_in_place_of_a_missing_closing_is_punished_more_than_prose(chat):
    unclosed = [*taught(chat, EIGHT, "span")][-1]
    begins, *goes_on = spelling(unclosed, "<answer>")
    assert begins == PUNISHED  # here </think> should have been
    right = [*goes_on, *spelling(unclosed, "A</answer>"), *spelling(unclosed, "<|im_end|>")]
    assert right and all(advantage == PROSE for advantage in right)
    assert sum(advantage == PUNISHED for _, advantage in unclosed) == 1


def test_by_span_each_property_pays_its_own_tags(chat):
    good = next(taught(chat, EIGHT, "span"))
    prose = {round(advantage, 4) for advantage in spelling(good, "look")}
    for_flow = {round(advantage, 4) for advantage in spelling(good, "<|im_end|>")}
    (closing,) = {round(advantage, 4) for advantage in spelling(good, "</think>")}
    # The three properties are worth 1, of which the flow is 0.3; their std is that of R_anchor.
    unit = 0.5 * (3 / 5) ** 0.5
    assert closing == pytest.approx(prose.pop() + unit, abs=1e-3)
    assert for_flow.pop() == pytest.approx(closing - 0.7 * unit, abs=1e-3)


def test_by_span_a_turn_that_ends_where_a_closing_was_due_is_punished_at_its_end(chat):
    short = "I look at it.<|im_end|>"
    *said, (end, advantage) = [*taught(chat, [GOOD, short], "span")][-1]
    assert end == "<|im_end|>" and advantage == pytest.approx(-1.5)
    assert {float(other) for _, other in said} == {-1.0}


def test_by_span_nobody_answers_for_what_was_cut_off(chat):
    cut = [*taught(chat, [GOOD, "I look at it."], "span")][-1]
    assert {float(advantage) for _, advantage in cut} == {-1.0}
