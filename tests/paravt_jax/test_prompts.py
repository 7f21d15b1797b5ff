"""The release's prompts are read from a file that is never run; here a file with the same layout."""

import asyncio
import json
import sys

import pytest
from agents import FakeFrames

from model_port.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.config import EvalConfig, load_config, to_record
from paravt_jax.prompts import import_release, main, to_yaml
from rollout.chat import Chat
from rollout.prompter import Task

DRIVER = '''
import json, os
open("was_run", "w")
TOOL_SCHEMA = json.dumps(
    {"type": "function", "function": {"name": "crop_video", "parameters": {"start_time": [1, True]}}}
)
HEAD = "You may look "  # put together below
GENERAL_AGENTIC_SYSTEM = HEAD + """closer.
<tools>
{tool_schema}
</tools>
Say {{"name": "crop_video"}}."""
MINIMAL_AGENTIC_SYSTEM = f"{HEAD}with {{tool_schema}}"
REASONING_SYSTEM: str = ("Think of {it}, " "then answer.")
DIRECT_SYSTEM = os.environ["WORDS"]

def eval_one(sample, vpath):
    q_text = sample["question"]
    q_text = f"{q_text} It is called {os.path.basename(vpath)}"
'''
SCHEMA = '{"type": "function", "function": {"name": "crop_video", "parameters": {"start_time": [1, true]}}}'


@pytest.fixture
def release(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "driver.py").write_text(DRIVER)
    return tmp_path


def overview_text(config) -> str:
    chat = Chat(tiny_tokenizer(), CHAT_TEMPLATE)
    prompter = config.rollout.prompter(FakeFrames(), chat)
    return chat.decode(asyncio.run(prompter.overview(Task("t", "What {is} it?", ("/a.mp4",), 1))).ids)


@pytest.mark.parametrize(
    ("mode", "system"),
    [
        ("agentic_general", f'You may look closer.\n<tools>\n{SCHEMA}\n</tools>\nSay {{"name": "crop_video"}}.'),
        ("agentic_minimal", f"You may look with {SCHEMA}"),
        ("reasoning", "Think of {it}, then answer."),
    ],
)
def test_a_policy_gets_the_prompts_of_the_release_with_one_tool_schema(release, mode, system):
    (release / "words.yaml").write_text(to_yaml(import_release(release / "driver.py", mode), "From there."))
    dispatch = "none" if mode == "reasoning" else "parallel"
    config = load_config(
        None, "rollout.prompts_file=words.yaml", f"rollout.dispatch={dispatch}", "reward.tool_reward=false"
    )
    video_name = "" if mode == "reasoning" else " It is called video.mp4"
    picture = "<0.0 seconds><|vision_start|><|image_pad|><|vision_end|>"
    assert overview_text(config).startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    question = overview_text(config).split(picture.removeprefix("<0.0"))[1]
    assert question.startswith(f"What {{is}} it?{video_name}<|im_end|>")
    assert not (release / "was_run").exists()


def test_a_run_record_contains_the_prompts(release):
    (release / "words.yaml").write_text("system: You watch.\n")
    config = load_config(None, "rollout.prompts_file=words.yaml")
    record = to_record(config)
    assert record["rollout"]["prompts"]["system"] == "You watch."
    (release / "run.yaml").write_text(json.dumps(record))
    assert load_config("run.yaml") == config


def test_every_dispatch_of_an_evaluation_is_checked_at_loading(release):
    (release / "words.yaml").write_text("system: You have crop_video.\nsystem_has_tools: true\n")
    settings = ["rollout.prompts_file=words.yaml", "data.validation=x", "eval.dispatches=[parallel,none]"]
    with pytest.raises(ValueError, match=r"rollout\.dispatch=none offers no tool"):
        load_config(None, *settings, schema=EvalConfig)


@pytest.mark.parametrize(
    ("file", "mode", "complaint"),
    [
        (
            "driver.py",
            "direct",
            r"driver.py: DIRECT_SYSTEM cannot be read: line 15, .*WORDS.*, is not a string literal",
        ),
        (
            "other.py",
            "agentic_general",
            "has no string constant GENERAL_AGENTIC_SYSTEM, .* It has: FIRST, SECOND$",
        ),
        ("no_schema.py", "agentic_minimal", "has no string constant TOOL_SCHEMA"),
        ("odd.py", "agentic_minimal", r"of --mode agentic_minimal, system has the placeholder \{video\}"),
        ("text.py", "reasoning", "text.py is not a Python file: "),
        ("bytes.py", "reasoning", "bytes.py is not a Python file: "),
        ("large.py", "reasoning", "has more than 1048576 bytes"),
        ("deep.py", "reasoning", "REASONING_SYSTEM cannot be read|is not a Python file"),
    ],
)
def test_an_unreadable_file_is_a_clear_error(release, file, mode, complaint):
    (release / "other.py").write_text('FIRST, _ = "a", 3\nFIRST = "a"\nSECOND = f"{FIRST}b"\nTHIRD = print()\n')
    (release / "no_schema.py").write_text('MINIMAL_AGENTIC_SYSTEM = "{tool_schema}"')
    (release / "odd.py").write_text('TOOL_SCHEMA = "{}"\nMINIMAL_AGENTIC_SYSTEM = "{tool_schema} {video}"')
    (release / "text.py").write_text("You may look closer.")
    (release / "bytes.py").write_bytes(b"\xff\0x")
    (release / "large.py").write_text("#" * 2**21)
    (release / "deep.py").write_text(f"REASONING_SYSTEM = {' + '.join(['str()'] * 9000)}")
    with pytest.raises(ValueError, match=complaint):
        import_release(release / file, mode)


DOUBLED = "".join(f"A{n + 1} = A{n} + A{n}\n" for n in range(39))


@pytest.mark.parametrize(
    "source",
    [
        'A0 = "x"\n' + DOUBLED,
        f'A = "{"x" * 1000}"\n' + "".join(f'B{n} = f"{"{A}" * 100}"\n' for n in range(200)),
        f'TOOL_SCHEMA = "{"x" * 100_000}"\nGENERAL_AGENTIC_SYSTEM = "{"{tool_schema}" * 10_000}"',
    ],
    ids=["doubled", "wide", "schema"],
)
def test_the_size_of_built_strings_is_limited(source, release):
    (release / "grows.py").write_text(source)
    with pytest.raises(ValueError, match=r"grows\.py builds strings of more than \d+ characters; give paravt"):
        import_release(release / "grows.py", "agentic_general")


def test_the_command_replaces_only_its_own_file(release, monkeypatch, capsys):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["prompts", "import-release", *arguments])
        main()
        return capsys.readouterr().out

    text = run("driver.py")
    assert (
        text.startswith("# agentic_general of paravt/eval/driver.py") and "system: |-\n  You may look closer." in text
    )
    assert "rollout.prompts_file=words.yaml" in run("driver.py", "--dst", "words.yaml")
    assert (release / "words.yaml").read_text() == text
    run("driver.py", "--dst", "words.yaml")
    with pytest.raises(ValueError, match=r"words\.yaml exists and was written by .* --mode agentic_general"):
        run("driver.py", "--dst", "words.yaml", "--mode", "agentic_minimal")
