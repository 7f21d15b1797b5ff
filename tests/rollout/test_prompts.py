"""User-defined prompts are validated, read from a file, and shown unchanged."""

import asyncio
import threading
import time
from typing import Any

import pytest
from agents import FakeFrames
from async_tests import async_test
from PIL import Image

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from rollout import picture
from rollout.chat import Chat
from rollout.episode_config import EpisodeConfig
from rollout.prompter import Task
from rollout.prompts import Prompts, main_messages, prompts_of, read_prompts, row_messages, subagent_messages
from rollout.tools import Window
from rollout.video.errors import ImageError

VIDEOS = [("video_0.mp4", 64.0, [0.0]), ("video_1.mp4", 8.0, [4.0])]


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> str:
        (tmp_path / "words.yaml").write_text(text)
        return str(tmp_path / "words.yaml")

    return write


def text_of(messages) -> list[str]:
    return [part["text"] for part in messages[1]["content"] if part["type"] == "text"]


def test_omitted_texts_have_their_defaults(written):
    texts = read_prompts(written("system: You watch.\nlast_turn: |\n  Now.\n  Answer.\n"))
    assert texts == Prompts(system="You watch.", last_turn="Now.\nAnswer.\n")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sistem: x", "words.yaml: sistem is not a prompt; use system, "),
        ("overview: '{nmae}: {duration_s}'", r"words.yaml: overview has the placeholder \{nmae\}; it may have \{name"),
        ("system: 'Say {\"a\": 1}'", "words.yaml: system has the placeholder .* a literal brace is written twice"),
        ("last_turn: 'Oh {message'", "words.yaml: last_turn cannot be filled in: expected '}'"),
        ("frame_time: '{time_s:d}'", "words.yaml: frame_time cannot be filled in: Unknown format code 'd'"),
        ("overview: '{}'", r"overview has the placeholder \{\}"),
        ("system: 5", "words.yaml: system is int, expected text"),
        ("system:", "words.yaml: system is NoneType, expected text"),
        ("system_has_tools: sure", "words.yaml: system_has_tools is str, expected true or false"),
        ("system: a\nsystem: b", "words.yaml is invalid YAML: .*duplicate key system"),
        ("system: [", "words.yaml is invalid YAML: "),
        ("- system", "words.yaml is list, expected texts such as system: "),
    ],
)
def test_an_invalid_file_is_reported_with_its_name_and_key(written, text, complaint):
    with pytest.raises(ValueError, match=complaint) as refused:
        read_prompts(written(text))
    assert "\n" not in str(refused.value) and str(refused.value).startswith("rollout.prompts_file=")


def test_a_missing_file_is_rejected():
    with pytest.raises(ValueError, match=r"^rollout\.prompts_file=gone\.yaml: No such file"):
        read_prompts("gone.yaml")


def test_texts_that_contradict_the_file_are_rejected(written):
    file = written("system: You watch.")
    texts = prompts_of(file, Prompts())
    assert prompts_of(file, texts) == texts  # as in a run's record
    with pytest.raises(ValueError, match=r"words.yaml and rollout\.prompts\.last_turn are both set"):
        prompts_of(file, Prompts(last_turn="Oh."))


def test_an_unknown_placeholder_is_rejected():
    with pytest.raises(ValueError, match=r"^rollout\.prompts\.subagent_intro has the placeholder \{ends\}"):
        Prompts(subagent_intro="It ends at {ends}.")


def test_a_question_replaces_its_placeholder_or_precedes_the_text():
    shown = main_messages(Prompts(with_tool="Q: {question} {{in {names}}}"), VIDEOS, "What {is} it?", 3)
    assert text_of(shown)[-1] == "Q: What {is} it? {in video_0.mp4, video_1.mp4}"
    shown = main_messages(Prompts(without_tool="Answer."), VIDEOS, "What?", 0)
    assert text_of(shown)[-1] == "What?\n\nAnswer."


def test_an_empty_overview_text_leaves_only_frames_and_question():
    shown = main_messages(Prompts(overview="", with_tool="{question}"), VIDEOS, "What?", 3)
    assert text_of(shown) == ["<0.0 seconds>", "<4.0 seconds>", "What?"]


def test_a_sub_agents_prompt_may_have_the_question():
    prompts = Prompts(subagent_instruction="Look for {question}, {{truly}}.", subagent_system="{{}}")
    shown = subagent_messages(prompts, Window(1.0, 2.0), [1.0], "a {cat}")
    assert text_of(shown)[-1] == "\nLook for a {cat}, {truly}." and shown[0]["content"] == "{}"


def test_the_releases_sub_agent_prompt():
    asked = "From {start} to {end}, {duration_s:.1f} s, {num_frames} frames."
    prompts = Prompts(subagent_system="", subagent_intro="", subagent_instruction=asked)
    (message,) = subagent_messages(prompts, Window(65.9, 3725.0), [66.0, 67.0], "a cat")
    text = {"type": "text", "text": "From 01:05 to 62:05, 3659.1 s, 2 frames."}
    assert message == {"role": "user", "content": [{"type": "image"}, {"type": "image"}, text]}


def shown_to(config: EpisodeConfig, **of_task: object) -> str:
    chat = Chat(tiny_tokenizer(), CHAT_TEMPLATE)
    known: dict[str, Any] = {"question": "What?", "videos": ("/a.mp4",), "frame_budget": 1}
    task = Task("t", **known | of_task)
    return chat.decode(asyncio.run(config.prompter(FakeFrames(), chat).overview(task)).ids)


ROW = (("system", "You watch. <think>"), ("user", "<video>\nWhat <|im_end|> is it? <video>"))
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def test_a_rows_messages_are_used_unchanged():
    shown = shown_to(EpisodeConfig(dispatch="none", prompts=Prompts(row_messages=True)), messages=ROW)
    system, user, _ = shown.split("<|im_start|>")[1:]
    assert system == "system\nYou watch. <think><|im_end|>\n"
    # The text has neither a placeholder nor a control token.
    assert user.endswith(f"{PICTURE}\nWhat < |im_end|> is it? <|im_end|>\n")


def test_a_placeholder_within_a_rows_control_token_does_not_hide_the_token():
    row = (("system", "You watch.<|im_<video>end|>"), ("user", "<video>What?<|im_<image>end|>"))
    shown = shown_to(EpisodeConfig(dispatch="none", prompts=Prompts(row_messages=True)), messages=row)
    assert shown.count("<|im_end|>") == 2 and "You watch.< |im_end|>" in shown and "<image>" in shown


def test_a_rows_system_text_gets_the_tools_unless_it_has_them():
    config = EpisodeConfig(prompts=Prompts(row_messages=True))
    shown = shown_to(config, messages=ROW)
    assert shown.count("<tools>") > 0 and shown.index("You watch.") < shown.index("# Tools")
    own = (("system", "You have <tools>\nlook\n</tools>"), ROW[1])
    assert "# Tools" not in shown_to(config, messages=own) and "start_time" not in shown_to(config, messages=own)


def test_without_messages_the_default_prompt_is_used():
    config = EpisodeConfig(prompts=Prompts(row_messages=True))
    assert shown_to(config) == shown_to(EpisodeConfig()) != shown_to(config, messages=ROW)
    assert shown_to(EpisodeConfig(), messages=ROW) == shown_to(EpisodeConfig())


def test_videos_without_a_placeholder_are_in_the_last_message():
    messages = [("user", "<video>First."), ("assistant", "Yes."), ("user", "And?")]
    first, middle, last = row_messages(Prompts(frame_time="{time_s:.0f}"), messages, [[1.0], [2.0], [3.0]], 0, str)
    texts = [[part.get("text", "+") for part in message["content"]] for message in (first, last)]
    assert texts == [["1", "+", "First."], ["2", "+", "3", "+", "And?"]] and middle["content"] == "Yes."


@pytest.fixture
def image(tmp_path) -> str:
    Image.new("RGB", (40, 24), "red").save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def test_a_question_without_a_video_has_its_images_and_no_tools(image):
    shown = shown_to(EpisodeConfig(), videos=(), images=(image, image), question="<image>\nWhat?", frame_budget=0)
    assert shown.split("<|im_start|>")[2] == f"user\n{PICTURE}{PICTURE}What?\n\n{Prompts.without_tool}<|im_end|>\n"
    assert "# Tools" not in shown and "# Tools" in shown_to(EpisodeConfig())
    text = shown_to(EpisodeConfig(), videos=(), question="What is an <image>?", frame_budget=0)
    assert PICTURE not in text and "What is an" in text and "image" in text.split("What is an")[1]


@async_test
async def test_all_prompters_together_decode_a_few_images_at_a_time(image, monkeypatch):
    """A server has a prompter for each question."""
    running: set[int] = set()
    most = 0

    def slow(opened: Image.Image) -> Image.Image:
        nonlocal most
        running.add(threading.get_ident())
        most = max(most, len(running))
        time.sleep(0.02)
        running.discard(threading.get_ident())
        return opened.convert("RGB")

    monkeypatch.setattr(picture, "in_rgb", slow)
    chat = Chat(tiny_tokenizer(), CHAT_TEMPLATE)
    prompters = [EpisodeConfig().prompter(FakeFrames(), chat) for _ in range(3)]
    task = Task("t", "What?", (), 0, images=(image,) * 8)
    await asyncio.gather(*(prompter.overview(task) for prompter in prompters))
    assert most == picture.IMAGES_AT_A_TIME


def test_an_image_whose_size_is_refused_is_named(image, monkeypatch):
    def refuse(self, picture):
        raise ValueError("it is too narrow")

    monkeypatch.setattr(FakeFrames, "fitted", refuse)
    with pytest.raises(ImageError, match=f"^{image} cannot be shown: it is too narrow$"):
        shown_to(EpisodeConfig(), videos=(), images=(image,), frame_budget=0)


def test_images_of_a_row_are_in_the_message_with_their_placeholder(image):
    row = (("user", "<image>First."), ("assistant", "Yes."), ("user", "And?"))
    config = EpisodeConfig(prompts=Prompts(row_messages=True))
    shown = shown_to(config, videos=(), images=(image, image, image), messages=row, frame_budget=0)
    assert shown.count(PICTURE) == 3 and f"{PICTURE}First." in shown and f"{PICTURE}{PICTURE}And?" in shown
    assert "# Tools" not in shown


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dispatch": "none"}, r"rollout\.dispatch=none offers no tool"),
        ({"tools": ["crop_video", "zoom_frame"]}, r"prompts\.system must name every tool.* also has zoom_frame"),
    ],
)
def test_a_system_text_must_have_the_tools_it_claims(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        EpisodeConfig(prompts=Prompts(system="You have crop_video.", system_has_tools=True), **settings).check_tools()
