"""EpisodeAdvantage for characters lands on the tokens that spell them, and on sampled ones only."""

import asyncio

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from qwen_tokenizer import qwen_tokenizer

from model_port.chat_template import CHAT_TEMPLATE
from model_port.processing import expand_placeholders
from model_port.tiny import tiny_tokenizer
from paravt_jax.learner.credit import (
    CLASSES,
    FIRST_AFTER_IMAGE,
    FIRST_OF_TURN,
    PLAIN,
    EpisodeAdvantage,
    dialogues_of,
    struct_mask,
)
from paravt_jax.rewards.terms import reward_terms
from rollout.chat import Chat
from rollout.episode import Agent, EpisodeConfig, Task

TURNS = [f"I look at it.</think>\n\n{call(3, 9)}<|im_end|>", "It is red.</think><answer>A</answer><|im_end|>"]
TOKEN_PX = 32


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def chat(request):
    return Chat({"tiny": tiny_tokenizer, "qwen": qwen_tokenizer}[request.param](), CHAT_TEMPLATE)


def play(chat, turns=TURNS, **config):
    agent = Agent(script(chat, turns), FakeFrames(size_px=(64, 96)), chat, EpisodeConfig(**config))

    async def run():
        return await agent.run(await agent.look(Task("t", "What colour?", ("/a.mp4",), 4)))

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


@pytest.mark.parametrize(
    ("anchors", "expected"),
    [
        (("closings",), {"</think>", "</tool_call>"}),
        (("openings",), {"<tool_call>"}),
        (("turn_end",), {"<|im_end|>"}),
        ((), set()),
    ],
)
def test_only_the_selected_anchors_count(anchors, expected, chat):
    episode, terms = play(chat, [TURNS[0], ANSWER.replace("<answer>A</answer>", "")])
    found = spelled(chat, episode, struct_mask(episode, terms.tags, chat, anchors))
    assert set(found) == expected


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
    (dialogue,) = dialogues_of(episode, 3, EpisodeAdvantage(0.5, 0.25), terms.tags, chat, TOKEN_PX)
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
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms.tags, chat, TOKEN_PX)
    counts = [6] * len(episode.ledger.pictures)
    np.testing.assert_array_equal(dialogue.ids, expand_placeholders(episode.ledger.ids, counts, chat.image_id))
    assert dialogue.frames == tuple(picture.key for picture in episode.ledger.pictures)
    assert dialogue.num_shared == len(episode.ledger.segments[0].ids) + 5 * len(counts)


def test_members_of_a_group_share_their_prompt(chat):
    one, two = (
        dialogues_of(episode, n, EpisodeAdvantage(1.0), terms.tags, chat, TOKEN_PX)[0]
        for n, (episode, terms) in enumerate([play(chat), play(chat, [ANSWER])])
    )
    assert one.shared == two.shared


def test_what_follows_a_sampled_placeholder_is_left_out(chat):
    episode, terms = play(chat, ["One <|image_pad|> two.</think><|im_end|>"])
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms.tags, chat, TOKEN_PX)
    assert chat.decode(dialogue.ids[dialogue.loss_mask]) == "One "
    assert len(dialogue.ids) == len(dialogue.loss_mask) == len(dialogue.advantage)


def test_what_follows_the_last_sampled_token_is_left_out(chat):
    episode, terms = play(chat, [TURNS[0], "I was cut off"])
    episode.ledger.add("environment", chat.encode("A very long response. " * 100))
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms.tags, chat, 32)
    assert dialogue.loss_mask[-1] and dialogue.loss_mask.sum() == episode.ledger.num_sampled


def test_sub_agents_learn_only_when_asked_to(chat):
    episode, terms = play(chat)
    assert len(dialogues_of(episode, 0, EpisodeAdvantage(0.5, 0.25), terms.tags, chat, TOKEN_PX)) == 1
    _, report = dialogues_of(episode, 0, EpisodeAdvantage(0.5, 0.25), terms.tags, chat, TOKEN_PX, subagent_loss=True)
    assert chat.decode(report.ids[report.loss_mask]) == "A report.<|im_end|>"
    assert set(report.advantage[report.loss_mask].tolist()) == {0.5}


def test_classes_name_where_a_mismatch_would_show(chat):
    episode, terms = play(chat)
    (dialogue,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms.tags, chat, TOKEN_PX)
    classes = dialogue.token_class
    assert np.count_nonzero(classes[dialogue.loss_mask] == FIRST_OF_TURN) == 2
    after = np.flatnonzero(classes == FIRST_AFTER_IMAGE)
    assert (dialogue.ids[after - 1] == chat.image_id).all()
    assert set(classes.tolist()) == set(range(len(CLASSES)))
    assert (classes[dialogue.loss_mask] == PLAIN).any()
