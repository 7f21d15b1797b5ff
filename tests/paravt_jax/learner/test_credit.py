"""The credit of characters is given to the sampled tokens that spell them."""

import agents
import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, script
from qwen_tokenizer import qwen_tokenizer

from model_port.inputs import NOT_REPLAYED
from model_port.processing import expand_placeholders
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.learner.advantages import EpisodeAdvantage, group_advantages, group_rewards
from paravt_jax.learner.credit import CLASSES, FIRST_OF_TURN, PLAIN, dialogues_of, struct_mask
from paravt_jax.learner.settings import AdvantageConfig
from paravt_jax.rewards.terms import reward_terms
from rollout.chat import Chat
from rollout.ledger import Segment
from rollout.prompter import Task

TURNS = [f"I look at it.</think>\n\n{call(3, 9)}<|im_end|>", "It is red.</think><answer>A</answer><|im_end|>"]


@pytest.fixture(scope="module", params=["tiny", "qwen"])
def chat(request):
    return Chat({"tiny": tiny_tokenizer, "qwen": qwen_tokenizer}[request.param](), CHAT_TEMPLATE)


def play(chat, turns=TURNS):
    task, frames = Task("t", "What colour?", ("/a.mp4",), 4), FakeFrames(size_px=(64, 96))
    episode = agents.play(script(chat, turns), chat, task, frames)
    terms = reward_terms([turn.text for turn in episode.turns], episode.outcomes, "A", "mcq")
    return episode, terms


def dialogue(chat, turns=TURNS, advantage=1.0):
    """Returns the episode of these turns, and its main agent's dialogue."""
    episode, terms = play(chat, turns)
    return episode, dialogues_of(episode, 0, EpisodeAdvantage(advantage), terms, chat)[0]


def spelled(chat, episode, mask) -> list[str]:
    """Returns the text of each run of masked tokens."""
    ids = episode.ledger.ids
    runs = np.split(np.flatnonzero(mask), np.flatnonzero(np.diff(np.flatnonzero(mask)) > 1) + 1)
    return [chat.decode(ids[run]) for run in runs if len(run)]


@pytest.mark.slow
def test_the_experts_of_a_mixture_stay_with_their_tokens(chat):
    """The last sampled token has no experts, and a picture's placeholder has those of all its tokens."""
    episode, terms = play(chat)
    (plain,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat)
    num_tokens = len(plain.ids)
    episode.ledger.experts = np.arange((num_tokens - 1) * 6, dtype=np.int16).reshape(-1, 3, 2)
    (main,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat)
    assert plain.experts is None and main.experts.shape == (num_tokens, 3, 2)
    np.testing.assert_array_equal(main.experts[:-1], episode.ledger.experts)
    assert (main.experts[-1] == NOT_REPLAYED).all()


@pytest.mark.slow
def test_structural_tokens_spell_the_tags_and_are_sampled(chat):
    episode, terms = play(chat)
    mask = struct_mask(episode, terms.tags, chat)
    tags = spelled(chat, episode, mask)
    assert tags[:3] == ["</think>", "<tool_call>", "</tool_call><|im_end|>"]
    # `<answer>` is spelled with ordinary tokens, and the last token of a tag may also spell its neighbor.
    assert tags[3].startswith("</think><answer>") and tags[-1].endswith("</answer><|im_end|>")
    assert not mask[~episode.ledger.sampled_mask].any()


def test_every_sampled_token_has_its_episodes_credit_and_structural_tokens_have_more(chat):
    episode, terms = play(chat)
    (main,) = dialogues_of(episode, 3, EpisodeAdvantage(0.5, 0.25), terms, chat)
    sampled = episode.ledger.sampled_mask
    structural = struct_mask(episode, terms.tags, chat)[sampled]
    np.testing.assert_allclose(main.advantage[main.loss_mask], 0.5 + 0.25 * structural)
    np.testing.assert_array_equal(main.ids[main.loss_mask], episode.ledger.ids[sampled])
    assert main.loss_mask.sum() == episode.ledger.num_sampled and main.episode == 3
    assert set(main.behavior_logp[main.loss_mask].tolist()) == {-0.5}


def test_the_likelihood_is_of_structural_tokens_of_the_main_agent(chat):
    episode, terms = play(chat)
    earned = EpisodeAdvantage(0.5, likelihood=0.25)
    main, report = dialogues_of(episode, 3, earned, terms, chat, subagent_loss=True)
    structural = struct_mask(episode, terms.tags, chat)[episode.ledger.sampled_mask]
    np.testing.assert_array_equal(main.likelihood[main.loss_mask], 0.25 * structural)
    assert not main.likelihood[~main.loss_mask].any() and not report.likelihood.any()
    assert set(main.advantage[main.loss_mask].tolist()) == {0.5}


def test_placeholders_are_expanded_as_in_the_model_and_a_group_shares_its_prompt(chat):
    episode, main = dialogue(chat)
    counts = [6] * len(episode.ledger.pictures)
    np.testing.assert_array_equal(main.ids, expand_placeholders(episode.ledger.ids, counts, chat.image_id))
    assert main.frames == tuple(picture.key for picture in episode.ledger.pictures)
    assert main.num_shared == len(episode.ledger.segments[0].ids) + 5 * len(counts)
    assert main.shared == dialogue(chat, [ANSWER])[1].shared


def test_a_dialogue_ends_with_a_sampled_placeholder(chat):
    episode, main = dialogue(chat, ["One <|image_pad|> two.</think><|im_end|>"], -1.0)
    assert chat.decode(main.ids[main.loss_mask]) == "One <|image_pad|>"
    assert main.loss_mask[-1] and main.advantage[-1] == -1 and main.behavior_logp[-1] == -0.5
    assert len(main.ids) == len(main.loss_mask) == len(main.advantage)
    assert len(main.frames) == len(episode.ledger.pictures)


def test_a_dialogue_ends_with_the_last_sampled_token(chat):
    episode, terms = play(chat, [TURNS[0], "I was cut off"])
    episode.ledger.add("environment", chat.encode("A very long response. " * 100))
    (main,) = dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat)
    assert main.loss_mask[-1] and main.loss_mask.sum() == episode.ledger.num_sampled
    del episode.ledger.segments[1:], episode.turns[:]  # without room for a turn there is nothing to train
    assert dialogues_of(episode, 0, EpisodeAdvantage(1.0), terms, chat) == []


def test_sub_agents_are_trained_only_with_subagent_loss(chat):
    episode, terms = play(chat)
    arguments = (episode, 0, EpisodeAdvantage(0.5, 0.25), terms, chat)
    assert len(dialogues_of(*arguments)) == 1
    _, report = dialogues_of(*arguments, subagent_loss=True)
    assert chat.decode(report.ids[report.loss_mask]) == "A report.<|im_end|>"
    assert set(report.advantage[report.loss_mask].tolist()) == {0.5}
    first, *others = report.token_class[report.loss_mask].tolist()
    assert first == FIRST_OF_TURN and set(others) == {PLAIN}


def test_token_classes_do_not_depend_on_a_change_of_weights_within_a_turn(chat):
    episode, terms = play(chat)
    arguments = (episode, 0, EpisodeAdvantage(1.0), terms, chat)
    (main,) = dialogues_of(*arguments)
    classes = main.token_class[main.loss_mask]
    assert np.count_nonzero(classes == FIRST_OF_TURN) == 2
    assert set(classes.tolist()) == set(range(len(CLASSES)))
    number, segment = next((n, s) for n, s in enumerate(episode.ledger.segments) if s.kind == "sampled")
    episode.ledger.segments[number : number + 1] = [
        Segment("sampled", segment.ids[part], (), segment.behavior_logp[part], version)
        for part, version in ((slice(3), 1), (slice(3, None), 2))
    ]
    np.testing.assert_array_equal(dialogues_of(*arguments)[0].token_class, main.token_class)


@pytest.fixture(autouse=True)
def negligible_epsilon(monkeypatch):
    monkeypatch.setattr("paravt_jax.learner.advantages.EPSILON", 1e-12)


GOOD = "I look at it.</think><answer>A</answer><|im_end|>"
UNCLOSED = GOOD.replace("</think>", "")


def token_credits(chat, turns, credit):
    """Returns the text and the advantage of every sampled token, for each episode of a group."""
    episodes = [play(chat, [text]) for text in turns]
    config = AdvantageConfig(credit=credit)
    group = group_advantages(group_rewards([terms for _, terms in episodes], anchor_scale=0.5, config=config), config)
    for number, (episode, terms) in enumerate(episodes):
        (main,) = dialogues_of(episode, number, group.of(number), terms, chat)
        ids, advantages = main.ids[main.loss_mask], main.advantage[main.loss_mask]
        yield [(chat.decode([token]), advantage) for token, advantage in zip(ids, advantages, strict=True)]


def spelling(tokens, text):
    """Returns the advantages of the tokens in the last occurrence of a text."""
    joined = "".join(piece for piece, _ in tokens)
    start, at = joined.rindex(text), 0
    for piece, advantage in tokens:
        if at < start + len(text) and at + len(piece) > start:
            yield float(advantage)
        at += len(piece)


EIGHT = [GOOD] * 5 + [UNCLOSED] * 3
PROSE, PUNISHED = pytest.approx(-1.29, abs=5e-3), pytest.approx(-1.94, abs=5e-3)  # −√(5/3), and half of it more


def test_with_token_credit_correct_tags_are_punished_for_a_wrong_one(chat):
    unclosed = [*token_credits(chat, EIGHT, "token")][-1]
    for tag in ("<answer>", "</answer>", "<|im_end|>"):
        assert PUNISHED in [*spelling(unclosed, tag)]
    assert all(advantage == PROSE for advantage in spelling(unclosed, "look"))


def test_with_span_credit_only_the_token_at_a_missing_tag_is_punished_more_than_prose(chat):
    unclosed = [*token_credits(chat, EIGHT, "span")][-1]
    first, *later = spelling(unclosed, "<answer>")
    assert first == PUNISHED  # </think> is missing here
    correct = [*later, *spelling(unclosed, "A</answer>"), *spelling(unclosed, "<|im_end|>")]
    assert correct and all(advantage == PROSE for advantage in correct)
    assert sum(advantage == PUNISHED for _, advantage in unclosed) == 1
    wordy = [*token_credits(chat, [GOOD, GOOD.replace("<answer>", "so: <answer>")], "span")][-1]
    assert next(spelling(wordy, "so:")) == min(advantage for _, advantage in wordy) < next(spelling(wordy, "look"))


def test_with_span_credit_each_property_rewards_its_own_tags(chat):
    good = next(token_credits(chat, EIGHT, "span"))
    prose, flow, closing = (next(spelling(good, text)) for text in ("look", "<|im_end|>", "</think>"))
    # The three properties are worth 1, of which the flow is 0.3; their std is the std of R_anchor.
    unit = 0.5 * (3 / 5) ** 0.5
    assert closing == pytest.approx(prose + unit, abs=1e-3)
    assert flow == pytest.approx(closing - 0.7 * unit, abs=1e-3)


def test_with_span_credit_a_turn_that_ends_without_a_closing_tag_is_punished_at_its_end(chat):
    *earlier, (end, advantage) = [*token_credits(chat, [GOOD, "I look at it.<|im_end|>"], "span")][-1]
    assert end == "<|im_end|>" and advantage == pytest.approx(-1.5)
    assert {float(other) for _, other in earlier} == {-1.0}


def test_with_span_credit_no_token_is_punished_for_a_turn_that_was_cut_off(chat):
    cut = [*token_credits(chat, [GOOD, "I look at it."], "span")][-1]
    assert {float(advantage) for _, advantage in cut} == {-1.0}
