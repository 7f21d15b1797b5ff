"""The release's texts are read from files that are never run; here files with the same layout and other words."""

import asyncio
import json
import sys

import pytest
from agents import FakeFrames

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.config import EvalConfig, load_config, to_record
from paravt_jax.evaluation.release import source
from paravt_jax.evaluation.release.texts import read_texts
from paravt_jax.prompts import SUBAGENT_FILE, import_release, main, rollout_prompts, to_yaml, training_prompts
from rollout.chat import Chat
from rollout.prompter import Task
from rollout.prompts import Prompts, subagent_messages
from rollout.tools import Window

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
DIRECT_SYSTEM = "Answer."
VIDEOZOOMER_AGENTIC_SYSTEM = "FILL_FROM_THERE"
SAGE_AGENTIC_SYSTEM = "FILL_FROM_THERE"
LONGVT_TOOL_PROMPT_SUFFIX = "You may crop."

def eval_one(sample, vpath):
    q_text = sample["question"]
    q_text = f"{q_text} It is called {os.path.basename(vpath)}"
    content = [f"{len(cropped)} pictures, {st:.1f} to {et:.1f}", f"[none at {st:.1f}-{et:.1f}]"]
    if sample["is_mcq"]:
        force = "Now a letter."
    else:
        force = ("Now {times}, " "please.")
'''
LOADERS = """
def load_samples(dataset_name, prompt_mode):
    mcq_instr = "Look." if prompt_mode == "direct" else "Choose."
    if dataset_name == "videomme":
        question = f"Q {item['question']}\\n{opts_str}\\n{mcq_instr}"
    if dataset_name == "videomme_wsub":
        sub_prefix = f"Said: {sub_text}\\n" if sub_text else ""
        question = f"{sub_prefix}Q {item['question']}\\n{opts_str}\\n{mcq_instr}"
    if dataset_name == "longvideobench":
        samples.append({"question": f"L {item['question']}\\n{opts_str}\\n{mcq_instr}"})
    if dataset_name == "lvbench":
        samples.append({"question": f"{item['question']}\\n{mcq_instr}"})
    if dataset_name == "mlvu":
        samples.append({"question": f"M {item['question']}\\n{opts_str}\\n{mcq_instr}"})
    if dataset_name == "mmvu":
        samples.append({"question": f"U {item['question']}\\n{opts_str}\\n{mcq_instr}"})
    if dataset_name == "charades":
        samples.append({"question": "When {is} " f'it: "{caption}"?'})
"""
SCHEMA = '{"type": "function", "function": {"name": "crop_video", "parameters": {"start_time": [1, true]}}}'


def write_release(root, driver=DRIVER, loaders=LOADERS):
    (root / "paravt" / "eval").mkdir(parents=True, exist_ok=True)
    for name, text in ((source.DRIVER, driver), (source.LOADERS, loaders)):
        (root / name).write_bytes(text.encode(errors="surrogateescape"))


@pytest.fixture
def release(tmp_path, monkeypatch):
    """A directory that counts as the release's commit."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "DIGESTS", {})
    write_release(tmp_path)
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
def test_a_policy_gets_the_releases_prompts_with_one_tool_schema(release, mode, system):
    (release / "words.yaml").write_text(to_yaml(rollout_prompts(import_release(release), mode), "From there."))
    dispatch = "none" if mode == "reasoning" else "parallel"
    config = load_config(None, "rollout.prompts_file=words.yaml", f"rollout.dispatch={dispatch}", "reward.tool=none")
    video_name = "" if mode == "reasoning" else " It is called video.mp4"
    picture = "<0.0 seconds><|vision_start|><|image_pad|><|vision_end|>"
    assert overview_text(config).startswith(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    question = overview_text(config).split(picture.removeprefix("<0.0"))[1]
    assert question.startswith(f"What {{is}} it?{video_name}<|im_end|>")
    assert not (release / "was_run").exists()


def test_all_texts_of_the_evaluation_survive_the_file(release):
    (release / "sage.txt").write_text("You plan {tools}.")
    texts = import_release(release, {"agentic_sage": release / "sage.txt"})
    (release / "release.yaml").write_text(to_yaml(texts, "From there."))
    read = read_texts("release.yaml")
    assert read.texts == texts
    assert read.fill("question.charades", caption="a {cat}") == 'When {is} it: "a {cat}"?'
    assert read.fill("question.mmvu", question="?", options="A. x", instruction="!") == "U ?\nA. x\n!"
    assert read.fill("subtitles", lines="Oh.") == "Said: Oh.\n"
    assert read.fill("response", num_frames=2, start_s=1, end_s=2.25) == "2 pictures, 1.0 to 2.2"
    assert read.fill("last.window") == "Now {times}, please." and read.fill("instruction.direct") == "Look."
    assert read.system("agentic_sage") == "You plan {tools}." and read.system("agentic_longvt") == "You may crop."
    with pytest.raises(ValueError, match=r"eval\.mode=agentic_videozoomer needs .*--text agentic_videozoomer=FILE"):
        read.check_mode("eval.mode", "agentic_videozoomer")


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
    ("old", "new", "complaint"),
    [
        (
            '"Answer."',
            'os.environ["WORDS"]',
            r"driver.py: the text system.direct cannot be read: line 15, .*WORDS.*, is not a",
        ),
        ("DIRECT_SYSTEM", "OTHER", "driver.py has no text system.direct; give the release's commit"),
        ("</tools>", "{video}", "not a template"),
        ("force", "other", "driver.py has no text last.choice"),
        ('"mlvu"', '"other"', "utils.py has no text question.mlvu"),
        ("M {item['question']}", "M {item['other']}", r"question.mlvu .* line 14, .*other.* is not an expression"),
        (LOADERS, "You may look closer.", "utils.py is not a Python file: "),
        (DRIVER, "\udcff\0x", "driver.py is not a Python file: "),  # no UTF-8
        (DRIVER, "#" * 2**21, "has more than 1048576 bytes"),
        (DRIVER, f"{DRIVER}DIRECT_SYSTEM = {' + '.join(['str()'] * 9000)}", "cannot be read|is not a Python file"),
    ],
)
def test_an_unreadable_release_is_a_clear_error(release, old, new, complaint):
    write_release(release, DRIVER.replace(old, new), LOADERS.replace(old, new))
    with pytest.raises(ValueError, match=complaint):
        import_release(release)


def test_another_commit_is_an_error_that_names_its_texts(release, monkeypatch):
    monkeypatch.setattr(source, "DIGESTS", {"last.choice": source.text_digest("Now a letter."), "system.direct": "0"})
    message = r"is not the release's commit cf55249: it has other texts of system\.direct; run"
    with pytest.raises(ValueError, match=message):
        import_release(release)


@pytest.mark.parametrize(
    ("directory", "complaint"),
    [
        ("paravt/eval/driver.py", "is a file; give the directory"),
        ("elsewhere", "driver.py does not exist; give the dir"),
    ],
)
def test_another_path_than_the_releases_directory_is_an_error(release, directory, complaint):
    with pytest.raises(ValueError, match=complaint):
        import_release(release / directory)


DOUBLED = "".join(f"A{n + 1} = A{n} + A{n}\n" for n in range(39))


@pytest.mark.slow
@pytest.mark.parametrize(
    "constants",
    [
        f'A0 = "x"\n{DOUBLED}DIRECT_SYSTEM = A39',
        f'A = "{"x" * 1000}"\nDIRECT_SYSTEM = f"{"{A}" * 10_000}"',
        f'TOOL_SCHEMA = "{"x" * 100_000}"\nGENERAL_AGENTIC_SYSTEM = "{"{tool_schema}" * 10_000}"',
    ],
    ids=["doubled", "wide", "schema"],
)
def test_the_size_of_built_strings_is_limited(constants, release):
    write_release(release, f"{DRIVER}\n{constants}\n")
    with pytest.raises(ValueError, match=r"cannot be read: it builds strings of more than \d+ characters"):
        import_release(release)


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ("system.direct: null", "must have a text for each name"),
        ("[1]", "must have a text for each name"),
        ("a: [", "is invalid YAML"),
        ("system.direct: Answer.", "the text system.reasoning is missing"),
    ],
)
def test_a_bad_file_of_texts_is_a_clear_error(release, changed, complaint):
    (release / "release.yaml").write_text(changed)
    with pytest.raises(ValueError, match=rf"^eval\.release_texts=release\.yaml.*{complaint}"):
        read_texts("release.yaml")


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        (
            "file_name",
            "{name} {question}",
            r"file_name must have these placeholders in this order: \{question\}, \{name\}",
        ),
        ("last.choice", "{", "last.choice must have these placeholders in this order: none"),
        ("response", "{num_frames:999999999} {start_s} {end_s}", "response must have these placeholders"),
        ("other", "x", "other is not a text of the release"),
    ],
)
def test_a_changed_text_is_a_clear_error(release, name, text, complaint):
    (release / "release.yaml").write_text(to_yaml(import_release(release) | {name: text}, "Changed."))
    with pytest.raises(ValueError, match=complaint):
        read_texts("release.yaml")


def test_the_command_replaces_only_its_own_file(release, monkeypatch, capsys):
    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["prompts", "import-release", *arguments])
        main()
        return capsys.readouterr().out

    text = run(".", "--mode", "agentic_general")
    assert text.startswith("# agentic_general of the ParaVT release") and "system: |-\n  You may look closer." in text
    assert "eval.release_texts=release.yaml" in run(".", "--dst", "release.yaml")
    assert (release / "release.yaml").read_text() == run(".")
    run(".", "--dst", "release.yaml")
    with pytest.raises(ValueError, match=r"release\.yaml exists and was written by .* import-release"):
        run(".", "--dst", "release.yaml", "--mode", "agentic_minimal")
    with pytest.raises(ValueError, match=r"--text direct=release.yaml is not MODE=FILE with a MODE of agentic_videoz"):
        run(".", "--text", "direct=release.yaml")


SUBAGENT = '''
class Cropped:
    def build_prompt(self, task, **kwargs):
        start_str, end_str, duration = "0", "1", 2.0
        prompt = f"""From {start_str} to {end_str} ({duration:.1f} s).

Say {{what}} happens:"""
        return prompt
'''


def with_subagent(directory, source=SUBAGENT):
    path = directory / SUBAGENT_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    return directory


def test_training_gets_the_rows_messages_and_the_sub_agents_text(tmp_path):
    (tmp_path / "words.yaml").write_text(to_yaml(training_prompts(with_subagent(tmp_path)), "From there."))
    prompts = load_config(None, f"rollout.prompts_file={tmp_path / 'words.yaml'}").rollout.prompts
    assert prompts.row_messages
    (message,) = subagent_messages(prompts, Window(61.0, 75.5), [61.0], "what?")
    text = "From 01:01 to 01:15 (14.5 s).\n\nSay {what} happens:"
    assert message["content"] == [{"type": "image"}, {"type": "text", "text": text}]


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("X = 1", "has no f-string prompt in build_prompt; give the released repository"),
        (SUBAGENT.replace("{end_str}", "{task}"), "the sub-agent's text has the value 'task', expected start_str"),
        ("def (", "is not a Python file"),
    ],
)
def test_an_unreadable_sub_agents_text_is_a_clear_error(source, complaint, tmp_path):
    with pytest.raises(ValueError, match=complaint):
        training_prompts(with_subagent(tmp_path, source))
    with pytest.raises(ValueError, match=r"cropped_video\.py does not exist; give the directory"):
        training_prompts(tmp_path / "gone")


def test_a_prompts_file_on_the_command_line_replaces_the_texts_of_a_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.yaml").write_text("system: You watch.\n")
    (tmp_path / "run.yaml").write_text("rollout: {prompts: {system: You look., last_turn: Now.}}\n")
    assert load_config("run.yaml", "rollout.prompts_file=words.yaml").rollout.prompts == Prompts(system="You watch.")
    (tmp_path / "both.yaml").write_text("rollout: {prompts_file: words.yaml, prompts: {last_turn: Now.}}\n")
    with pytest.raises(ValueError, match=r"prompts_file=words\.yaml and rollout\.prompts\.last_turn are both"):
        load_config("both.yaml")
