"""Reward plugins: their arguments, their results, and that a failure only invalidates one episode."""

import asyncio
import json
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from async_tests import async_test

from paravt_jax.rewards import OwnTerm, Place, RewardConfig
from paravt_jax.rewards.plugin import ExecutedCall, GroupPlugin, Plugin, PluginError, load_plugin
from rollout.ledger import Ledger
from rollout.prompter import Task
from rollout.records import Call, Episode, Turn
from rollout.toolbox import forget_user_code
from rollout.tools import find_calls
from rollout.user_code import await_user_code, load_object

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


def loaded(name):
    return load_plugin(RewardConfig(plugin=str(name)))


def terms_from(plugin, *texts):
    return asyncio.run(plugin.terms(episode(*texts or (LOOKED, ANSWERED)), "B", "mcq"))


def test_the_example_rewards_short_thinking_and_penalizes_repeated_calls():
    brief, repeated = terms_from(loaded(f"{EXAMPLE}:reward"))
    # 4 words before the first </think>, which the forced prefix is one of, and 4 before the second
    assert (brief.name, brief.weight, brief.value) == ("brief", 0.2, pytest.approx(1 - 8 / 60))
    spans = [LOOKED.index("</think>"), ANSWERED.index("</think>")]
    assert brief.places == tuple(Place(turn, start, start + 8) for turn, start in enumerate(spans))
    assert (repeated.name, repeated.weight, repeated.value) == ("repeated", 0.1, -1.0)
    second = LOOKED.rindex(CALL)
    assert repeated.places == (Place(0, second, second + len(CALL)),)


def test_the_example_does_not_reward_unclosed_thinking():
    brief, _ = terms_from(loaded(f"{EXAMPLE}:reward"), "<think>\nhm")
    assert brief.value == 0 and brief.places == ()


def test_the_docs_show_the_example_in_twenty_lines():
    text = EXAMPLE.read_text()
    assert len(text.splitlines()) == 20
    assert f"```python\n{text}```" in (ROOT / "docs" / "rewards.md").read_text()


def test_a_function_receives_the_question_the_turns_and_the_calls():
    received = {}

    def reward(**arguments):
        received.update(arguments)
        return []

    assert terms_from(Plugin(reward, 5.0)) == ()
    executed = "crop_video", {"start_time": 2, "end_time": 5}, "ok", "A report."
    starts = (LOOKED.index(CALL), LOOKED.rindex(CALL))
    first, second = (ExecutedCall(0, (start, start + len(CALL)), *executed) for start in starts)
    texts = {"question": "Which one?", "answer": "B", "question_type": "mcq", "turns": [LOOKED, ANSWERED]}
    assert received == texts | {"calls": [first, second], "outcomes": ["ok", "ok"]}


def scores_from(function, *texts, columns=None):
    plugin = load_plugin(RewardConfig(plugin=function)) if isinstance(function, str) else function
    return asyncio.run(plugin.terms([episode(*text) for text in texts], "B", "quiz", columns or {}))


GROUP = """
def scored(completions, answers, keywords, prompts, threshold=0.5, **others):
    global received
    received = completions, answers, keywords, prompts, threshold, others
    return [1, None, 0.25]
"""


def test_a_function_of_completions_receives_a_group_and_the_columns_that_it_names(tmp_path):
    (tmp_path / "mine.py").write_text(GROUP)
    location = f"{tmp_path}/mine.py:scored"
    columns = {"keywords": ["pan"], "threshold": 3}
    terms = scores_from(location, (LOOKED, ANSWERED), (ANSWERED,), ("hm",), columns=columns)
    assert terms == [OwnTerm("scored", 1.0), None, OwnTerm("scored", 0.25)]
    assert load_plugin(RewardConfig(plugin=location)).columns == ("keywords",)
    received = load_object("reward.plugin", location).__globals__["received"]
    completions, answers, keywords, prompts, threshold, others = received
    assert completions == [f"{LOOKED}\n{ANSWERED}", ANSWERED, "hm"]
    assert (answers, keywords, prompts, threshold) == (["B"] * 3, [["pan"]] * 3, ["Which one?"] * 3, 0.5)
    assert others["turns"] == [[LOOKED, ANSWERED], [ANSWERED], ["hm"]]
    assert others["question_type"] == ["quiz"] * 3 and len(others["calls"][0]) == 2


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (0.5, r"expected a list of 2 numbers, got 0\.5$"),
        ([0.5], r"expected a list of 2 numbers, got \[0\.5\]$"),
        (["0.5", "1"], r"expected a list of 2 numbers, got \['0\.5', '1'\]$"),
        ([0.5, float("nan")], "expected numbers"),
        ([0.5, 1e20], "expected numbers"),
    ],
)
def test_an_invalid_list_of_scores_is_an_error_and_never_zero(returned, complaint):
    plugin = GroupPlugin(lambda completions: returned, 5.0, "mine", ("completions",), ())
    with pytest.raises(PluginError, match=complaint):
        scores_from(plugin, (ANSWERED,), (ANSWERED,))


async def slowly(**_):
    await asyncio.sleep(30)


def blocking(**_):
    time.sleep(2)


def raising(problem):
    def reward(**_):
        raise problem

    return reward


def raising_later(problem):
    async def reward(**_):
        await asyncio.sleep(0)
        raise problem

    return reward


def returning(*terms):
    return lambda **_: list(terms)


BRIEF = OwnTerm("brief", 0.5)


@pytest.mark.parametrize(
    ("function", "complaint"),
    [
        (slowly, r"^it returned nothing within 0\.2 s$"),
        (blocking, r"^it returned nothing within 0\.2 s$"),
        (raising(KeyError("colour")), r"KeyError: 'colour'$"),
        (raising_later(TimeoutError("my judge")), r"TimeoutError: my judge$"),
        (raising_later(StopIteration()), r"RuntimeError: .*StopIteration"),
        (raising(SystemExit(3)), r"SystemExit: 3$"),
        (lambda **_: None, r"expected a list of paravt_jax\.rewards\.OwnTerm, got None$"),
        (lambda **_: 0.5, r"got 0\.5$"),
        (lambda **_: [0.5], r"got \[0\.5\]$"),
        (returning(BRIEF, BRIEF), r"two terms have the name brief$"),
        (returning(OwnTerm("length", 0.5)), r"two terms have the name length$"),
        (
            returning(OwnTerm("brief", 0.5, (Place(2, 0, 1),))),
            r"the term brief has the place \(2, 0, 1\), which is not in",
        ),
        (returning(OwnTerm("brief", 0.5, (Place(-1, 0, 1),))), r"has the place \(-1, 0, 1\)"),
        (returning(OwnTerm("brief", 0.5, (Place(1, 5, 5),))), r"has the place \(1, 5, 5\)"),
        (returning(OwnTerm("brief", 0.5, (Place(1, 0, 4.5),))), r"TypeError: 'float' object cannot be interpreted as"),
        (returning(OwnTerm("brief", 0.5, (Place(1, 0, 10_000),))), r"has the place \(1, 0, 10000\)"),
    ],
)
def test_an_invalid_result_is_an_error_and_never_zero(function, complaint):
    with pytest.raises(PluginError, match=complaint):
        terms_from(Plugin(function, 0.2))


def test_numpy_numbers_become_python_numbers_for_json():
    places = (tuple(np.array([1, 0, 4])),)
    (term,) = terms_from(Plugin(returning(OwnTerm("brief", np.float32(0.5), places, weight=np.float32(2))), 5.0))
    assert json.loads(json.dumps(asdict(term))) == {"name": "brief", "value": 0.5, "places": [[1, 0, 4]], "weight": 2.0}


ENDING = (asyncio.CancelledError, SystemExit, KeyboardInterrupt, GeneratorExit)


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("later", [True, False])
@async_test
async def test_exceptions_that_end_tasks_or_processes_only_fail_their_episode(kind, later):
    function = (raising_later if later else raising)(kind("out"))
    asyncio.current_task().cancel()
    with suppress(asyncio.CancelledError):  # as some libraries do
        await asyncio.sleep(0)
    with pytest.raises(PluginError, match=f"{kind.__name__}: out$"):
        await Plugin(function, 5.0).terms(episode(ANSWERED), "B", "mcq")
    await asyncio.sleep(0)  # the run continues


@pytest.mark.parametrize("function", [slowly, blocking])
@async_test
async def test_cancelling_a_run_does_not_wait_for_its_functions(function):
    task = asyncio.create_task(Plugin(function, 20.0).terms(episode(ANSWERED), "B", "mcq"))
    await asyncio.sleep(0.05)
    started_s = time.monotonic()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and time.monotonic() - started_s < 1


def test_a_function_does_not_block_closing_its_coroutine():
    running = Plugin(slowly, 5.0).function()
    call_user_code = await_user_code(running)

    async def begin():
        call_user_code.send(None)

    asyncio.run(begin())
    call_user_code.close()  # raises if the coroutine continues
    assert running.cr_frame is None


@async_test
async def test_user_functions_of_episodes_run_concurrently():
    """Each function returns only after all have been called."""
    threads, tasks = threading.Barrier(4, timeout=20), asyncio.Barrier(4)

    def blocking_together(**_):
        threads.wait()
        return [BRIEF]

    async def together(**_):
        await tasks.wait()
        return [BRIEF]

    plugins = [Plugin(function, 20.0) for function in (blocking_together, together) for _ in range(4)]
    terms = await asyncio.gather(*(plugin.terms(episode(ANSWERED), "B", "mcq") for plugin in plugins))
    assert terms == [(BRIEF,)] * 8


@pytest.mark.parametrize(
    ("text", "name", "complaint"),
    [
        (None, "reward", "there is no file"),
        ("def reward(:", "reward", "cannot be loaded: SyntaxError"),
        ("import nothing_of_this_name", "reward", "cannot be loaded: ModuleNotFoundError: No module named"),
        (f"def reward({ARGUMENTS}): return []", "other", "the file has no other"),
        ("reward = 3", "reward", "is not a function"),
        ("def reward(question, answer): return []", "reward", f"must take {ARGUMENTS}: "),
        (f"def reward({ARGUMENTS}, more): return []", "reward", "must take .*: missing a required argument: 'more'"),
        ("def accuracy(completions): return []", "accuracy", "the function's name is its term's: invalid term name"),
        ("def length(completions): return []", "length", "the function's name is its term's: length is the term of"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_one_line_error(text, name, complaint, tmp_path):
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=rf"^reward\.plugin={file}:{name}.*{complaint}") as refused:
        loaded(f"{file}:{name}")
    assert "\n" not in str(refused.value)


def test_a_file_may_define_dataclasses_and_take_extra_keywords(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from paravt_jax.rewards import OwnTerm\n@dataclass\nclass Mine:\n    x: float = 0.5\n"
        "async def reward(turns, **others):\n    return [OwnTerm('mine', Mine().x)]\n"
    )
    assert terms_from(loaded(f"{tmp_path}/mine.py:reward")) == (OwnTerm("mine", 0.5),)


def test_a_file_may_import_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside_mine.py").write_text("NAME = 'lids'\n")
    (tmp_path / "mine.py").write_text("from beside_mine import NAME\n")
    assert load_object("data.split", f"{tmp_path}/mine.py:NAME") == "lids"


def test_a_relative_path_is_a_file_of_the_current_directory(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(f"NAME = {name!r}")
        monkeypatch.chdir(tmp_path / name)
        assert load_object("data.split", "mine.py:NAME") == name


def test_the_next_run_loads_an_edited_file_again(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("NUMBER = [1]")
    location = f"{file}:NUMBER"
    first = load_object("data.split", location)
    forget_user_code()
    assert load_object("data.split", location) is first == [1]
    file.write_text("NUMBER = [2]")  # same size, and possibly the same second
    assert load_object("data.split", location) is first == [1]  # of a run that still loads its model
    forget_user_code()
    assert load_object("data.split", location) == [2] and first == [1]
