"""Rewards of a user's own: what they are given, what they may say, and that whatever they do harms one episode."""

import asyncio
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from paravt_jax.rewards import OwnTerm, Place, RewardConfig
from paravt_jax.rewards.plugin import ExecutedCall, Plugin, PluginError, load_plugin
from rollout.ledger import Ledger
from rollout.prompter import Task
from rollout.records import Call, Episode, Turn
from rollout.tools import find_calls
from rollout.user_code import await_user_code

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "docs" / "examples" / "own_reward.py"
ARGUMENTS = "question, answer, question_type, turns, calls, outcomes"
CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 2, "end_time": 5}}</tool_call>'
LOOKED = f"<think>\nlet me look</think>{CALL}{CALL}"
ANSWERED = "<think>\nit is red</think><answer>B</answer>"


def episode(*texts, outcome="ok"):
    turns = [Turn(text, "stop", (0, 0)) for text in texts]
    for turn in turns:
        turn.calls = [Call(call, outcome, "A report.") for call in find_calls(turn.text)]
    return Episode("e", Task("t", "Which one?", ("/a.mp4",), 4), Ledger(), turns)


def loaded(place):
    return load_plugin(RewardConfig(plugin=str(place)))


def said_by(plugin, *texts):
    return asyncio.run(plugin.terms(episode(*texts or (LOOKED, ANSWERED)), "B", "mcq"))


def test_the_example_of_the_docs_pays_short_thinking_and_takes_off_for_calls_made_twice():
    brief, repeated = said_by(loaded(f"{EXAMPLE}:reward"))
    # 4 words before the first </think>, which the forced prefix is one of, and 4 before the second
    assert (brief.name, brief.weight, brief.value) == ("brief", 0.2, pytest.approx(1 - 8 / 60))
    spans = [LOOKED.index("</think>"), ANSWERED.index("</think>")]
    assert brief.places == tuple(Place(turn, start, start + 8) for turn, start in enumerate(spans))
    assert (repeated.name, repeated.weight, repeated.value) == ("repeated", 0.1, -1.0)
    second = LOOKED.rindex(CALL)
    assert repeated.places == (Place(0, second, second + len(CALL)),)


def test_the_example_does_not_pay_for_thinking_that_never_ends():
    brief, _ = said_by(loaded(f"{EXAMPLE}:reward"), "<think>\nhm")
    assert brief.value == 0 and brief.places == ()


def test_the_example_is_twenty_lines_and_stands_in_its_page():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) == 20
    assert f"```python\n{text}```" in (ROOT / "docs" / "rewards.md").read_text()


def test_a_function_is_given_what_was_asked_said_and_done():
    given = {}

    def reward(**arguments):
        given.update(arguments)
        return []

    assert said_by(Plugin(reward, 5.0)) == ()
    arguments = {"start_time": 2, "end_time": 5}
    first, second = (
        ExecutedCall(0, (start, start + len(CALL)), "crop_video", arguments, "ok", "A report.")
        for start in (LOOKED.index(CALL), LOOKED.rindex(CALL))
    )
    assert given == {
        "question": "Which one?",
        "answer": "B",
        "question_type": "mcq",
        "turns": [LOOKED, ANSWERED],
        "calls": [first, second],
        "outcomes": ["ok", "ok"],
    }


async def slowly(**_):
    await asyncio.sleep(30)


def blocking(**_):
    time.sleep(2)


def raising(**_):
    raise KeyError("colour")


async def raising_later(**_):
    await asyncio.sleep(0)
    raise StopIteration


def leaving(**_):
    raise SystemExit(3)


def giving(*terms):
    return lambda **_: list(terms)


BRIEF = OwnTerm("brief", 0.5)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (slowly, r"reward\.plugin returned nothing within 0\.2 s$"),
        (blocking, r"reward\.plugin returned nothing within 0\.2 s$"),
        (raising, r"KeyError: 'colour'$"),
        (raising_later, r"RuntimeError: .*StopIteration"),
        (leaving, r"SystemExit: 3$"),
        (lambda **_: None, r"expected a list of paravt_jax\.rewards\.OwnTerm, got None$"),
        (lambda **_: 0.5, r"got 0\.5$"),
        (lambda **_: [0.5], r"got \[0\.5\]$"),
        (giving(BRIEF, BRIEF), r"two terms have the name brief$"),
        (giving(OwnTerm("brief", 0.5, (Place(2, 0, 1),))), r"the term brief has a place \(2, 0, 1\) that is not in"),
        (giving(OwnTerm("brief", 0.5, (Place(1, 5, 5),))), r"has a place \(1, 5, 5\)"),
        (giving(OwnTerm("brief", 0.5, (Place(1, 0, 10_000),))), r"has a place \(1, 0, 10000\)"),
    ],
)
def test_what_is_no_answer_is_said_and_is_never_a_zero(function, complaint):
    with pytest.raises(PluginError, match=complaint):
        said_by(Plugin(function, 0.2))


ENDING = (asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit)


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_function_that_raises_what_ends_tasks_or_processes_fails_alone(kind, asynchronous):
    def function(**_):
        raise kind("out")

    async def later(**_):
        await asyncio.sleep(0)
        raise kind("out")

    async def scored():
        asyncio.current_task().cancel()
        with suppress(asyncio.CancelledError):  # as some library may, before
            await asyncio.sleep(0)
        with pytest.raises(PluginError, match=f"{kind.__name__}: out$"):
            await Plugin(later if asynchronous else function, 5.0).terms(episode(ANSWERED), "B", "mcq")
        return "goes on"

    assert asyncio.run(scored()) == "goes on"


@pytest.mark.parametrize("function", [slowly, blocking])
def test_whoever_cancels_a_run_does_not_wait_for_its_functions(function):
    async def cancelled():
        task = asyncio.create_task(Plugin(function, 20.0).terms(episode(ANSWERED), "B", "mcq"))
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled() and time.monotonic() - started_s

    assert 0 < asyncio.run(cancelled()) < 1


def test_a_coroutine_that_is_closed_is_not_held_up_by_a_function():
    running = Plugin(slowly, 5.0).function()
    call_user_code = await_user_code(running)

    async def begin():
        call_user_code.send(None)

    asyncio.run(begin())
    call_user_code.close()  # raises where it is not the end
    assert running.cr_frame is None


def test_episodes_do_not_wait_for_each_other():
    """Everyone gives an answer only when all have been asked."""
    threads = threading.Barrier(4, timeout=20)

    def blocking_together(**_):
        threads.wait()
        return [BRIEF]

    async def ask():
        tasks = asyncio.Barrier(4)

        async def together(**_):
            await tasks.wait()
            return [BRIEF]

        plugins = [Plugin(function, 20.0) for function in (blocking_together, together) for _ in range(4)]
        return await asyncio.gather(*(plugin.terms(episode(ANSWERED), "B", "mcq") for plugin in plugins))

    assert asyncio.run(ask()) == [(BRIEF,)] * 8


@pytest.mark.parametrize(
    ("text", "name", "complaint"),
    [
        (None, "reward", "there is no file"),
        ("def reward(:", "reward", "cannot be loaded: SyntaxError"),
        ("import nothing_of_this_name", "reward", "cannot be loaded: ModuleNotFoundError: No module named"),
        (f"def reward({ARGUMENTS}): return []", "other", "has no function other"),
        ("reward = 3", "reward", "has no function reward"),
        ("def reward(question, answer): return []", "reward", f"must take {ARGUMENTS}: "),
        (f"def reward({ARGUMENTS}, more): return []", "reward", "must take .*: missing a required argument: 'more'"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_sentence_that_names_it(text, name, complaint, tmp_path):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=rf"^reward\.plugin={file}:{name}.*{complaint}") as refused:
        loaded(f"{file}:{name}")
    assert "\n" not in str(refused.value)


def test_without_a_name_nothing_is_loaded():
    assert load_plugin(RewardConfig()) is None


def test_a_file_may_hold_dataclasses_and_take_more_than_is_given(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from paravt_jax.rewards import OwnTerm\n@dataclass\nclass Mine:\n    x: float = 0.5\n"
        "async def reward(turns, **others):\n    return [OwnTerm('mine', Mine().x)]\n"
    )
    assert said_by(loaded(f"{tmp_path}/mine.py:reward")) == (OwnTerm("mine", 0.5),)
