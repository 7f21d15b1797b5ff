"""The texts of the agents' prompts, and the messages built from them. Each frame follows its time in seconds."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from pathlib import Path
from string import Formatter
from typing import Any, Literal

from rollout.setting import setting
from rollout.tools import CROP_VIDEO_SPEC, ToolSpec, Window

PLACEHOLDER = "<video>"  # marks the place of a video in a row's message
IMAGE_PLACEHOLDER = "<image>"  # marks the place of an image
# The placeholders of a window: its times in seconds and as MM:SS, its duration and its number of frames.
WINDOW: Mapping[str, Any] = {"start_s": 0.0, "end_s": 0.0, "start": "", "end": "", "duration_s": 0.0, "num_frames": 0}
# The placeholders that each text may have, with values to try them. Other texts have no placeholders.
PLACEHOLDERS: Mapping[str, Mapping[str, Any]] = {
    "frame_time": {"time_s": 0.0},
    "overview": {"name": "", "duration_s": 0.0, "num_frames": 0},
    "with_tool": {"uses": "", "gives": "", "max_parallel": 0, "question": "", "names": ""},
    "without_tool": {"question": "", "names": ""},
    "subagent_intro": WINDOW,
    "subagent_instruction": {"question": "", **WINDOW},
}
MAX_TEXT_CHARS = 100_000  # as in rows of data
MAX_PLACEHOLDERS = 64  # per text, because each may expand to a whole question
MAX_FORMAT_CHARS = 60  # an error quotes at most this much of an invalid format
MAX_WIDTH = 100  # in a number format, because a model's file could ask for two billion characters
IMAGE = {"type": "image"}  # a content part of a message
ShownTimes = tuple[str, float, Sequence[float]]  # a video's name, duration and frame times


@dataclass(frozen=True)
class PastTurn:
    """An earlier turn of a conversation, without the model's thinking and calls."""

    role: Literal["user", "assistant"]
    text: str
    num_videos: int = 0  # the turn shows the next so many of the task's videos
    num_images: int = 0  # and the next so many of its images


@dataclass(frozen=True)
class Prompts:
    """The texts of prompts. Use the texts that a model was trained with, and write a literal brace twice."""

    system: str = setting(
        "You are a helpful assistant who answers questions about long videos.", "the main agent's system message"
    )
    system_has_tools: bool = setting(
        False, "true: the system text describes the tools, and the chat template does not add them"
    )
    row_messages: bool = setting(
        False,
        "true: the messages of a row, system text included, are the dialogue, as in the release; system, overview, "
        "with_tool and without_tool are then for other questions only",
    )
    frame_time: str = setting("<{time_s:.1f} seconds>", "before every frame")
    overview: str = setting(
        "{name}: {duration_s:.1f} seconds, {num_frames} frames of it:",
        "before the frames of each video; empty: nothing",
    )
    with_tool: str = setting(
        "Think first, between <think> and </think>. Where the frames do not show enough, call {uses}, up to "
        "{max_parallel} calls in one turn: {gives}. When you know, give the answer between <answer> and </answer>.",
        "after the question, or with {question} in it; if calls can be made",
    )
    without_tool: str = setting(
        "Think first, between <think> and </think>, then give the answer between <answer> and </answer>.",
        "the same if no calls can be made",
    )
    subagent_system: str = setting(
        "You are a helpful assistant who looks closely at a part of a video.",
        "the sub-agents' system message; empty: none",
    )
    subagent_intro: str = setting(
        "The part of the video from {start_s:.1f} to {end_s:.1f} seconds, {num_frames} frames of it:",
        "before the frames of a window, also where the main agent sees them; empty: nothing, and a sub-agent's frames "
        "have no times",
    )
    subagent_instruction: str = setting(
        "Summarise what happens in this part, with the times at which it happens. Say only what the frames show.",
        "after those frames; may contain {question}, and the window as in subagent_intro",
    )
    last_turn: str = setting(
        "This was the last call. Answer now.", "after the responses to the last possible calls; empty: nothing"
    )

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if problem := placeholder_problem(name, value):
                raise ValueError(f"rollout.prompts.{problem}")


def placeholder_problem(name: str, text: Any) -> str:
    """Returns the problem with a text's placeholders, or ""."""
    if not isinstance(text, str):
        return ""
    if len(text) > MAX_TEXT_CHARS:
        return f"{name} has {len(text)} characters, more than {MAX_TEXT_CHARS}"
    allowed = PLACEHOLDERS.get(name, {})
    listing = ", ".join(f"{{{name}}}" for name in allowed) or "none"
    try:
        fields_of = [(key, spec or "") for _, key, spec, _ in Formatter().parse(text) if key is not None]
        if len(fields_of) > MAX_PLACEHOLDERS:
            return f"{name} has {len(fields_of)} placeholders, more than {MAX_PLACEHOLDERS}"
        unknown = [key for key, _ in fields_of if key not in allowed]
        if wide := [spec for _, spec in fields_of if _is_wide(spec)]:
            return (
                f"{name} has the format {wide[0][:MAX_FORMAT_CHARS]!r}; it may have no braces, and numbers up to "
                f"{MAX_WIDTH}"
            )
        if not unknown:
            text.format(**allowed)
            return ""
        problem = f"has the placeholder {{{unknown[0]}}}"
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        problem = f"cannot be filled in: {error}"
    return f"{name} {problem}; it may have {listing}, and a literal brace is written twice"


def _is_wide(spec: str) -> bool:
    numbers = re.findall(r"\d+", spec)
    return "{" in spec or any(len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH for number in numbers)


def read_prompts(path: str | Path) -> Prompts:
    """Reads a YAML file with keys of Prompts; missing keys get their defaults."""
    from omegaconf import OmegaConf  # imported only if needed
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    label = f"rollout.prompts_file={path}"
    try:
        layer = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as problem:
        raise ValueError(f"{label}: {problem.strerror}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as problem:
        raise ValueError(f"{label} is invalid YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(layer, dict):
        raise ValueError(f"{label} is {type(layer).__name__}, expected texts such as system: You watch videos.")
    kinds = {field.name: type(field.default) for field in fields(Prompts)}
    for name, value in layer.items():
        if name not in kinds:
            raise ValueError(f"{label}: {name} is not a prompt; use {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            expected = "text" if kinds[name] is str else "true or false"
            raise ValueError(f"{label}: {name} is {type(value).__name__}, expected {expected}")
        if problem := placeholder_problem(name, value):
            raise ValueError(f"{label}: {problem}")
    return Prompts(**{str(name): value for name, value in layer.items()})


def prompts_of(file: str, inline: Prompts) -> Prompts:
    """Reads a file of texts. Raises if `inline` sets other texts; equal texts are allowed, as in a run's record."""
    texts = read_prompts(file)
    if inline in (Prompts(), texts):
        return texts
    set_too = [f"rollout.prompts.{name}" for name, value in asdict(inline).items() if value != getattr(Prompts, name)]
    raise ValueError(
        f"rollout.prompts_file={file} and {', '.join(set_too)} are both set; write the text into the file, or leave "
        f"one of them out"
    )


def frame_parts(prompts: Prompts, times_s: Sequence[float]) -> list[dict[str, Any]]:
    """Returns a message's content parts for frames: each frame's time as text, then its picture."""
    parts = []
    for time_s in times_s:
        parts += [text_part(prompts.frame_time.format(time_s=time_s)), IMAGE]
    return parts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def main_messages(
    prompts: Prompts,
    videos: Sequence[ShownTimes],
    question: str,
    max_parallel: int,
    tools: Sequence[ToolSpec] = (CROP_VIDEO_SPEC,),
    history: Sequence[PastTurn] = (),
    num_images: int = 0,
) -> list[dict[str, Any]]:
    """Returns the main agent's messages. Each video is given by its name, duration and frame times.

    `max_parallel=0` means no tools. Pictures that `history` does not show go into the last message, images before
    videos.
    """
    shown = iter(videos)
    past = [_past_message(prompts, turn, islice(shown, turn.num_videos)) for turn in history]
    num_images -= sum(turn.num_images for turn in history)
    content = [*num_images * [IMAGE], *_overview_parts(prompts, shown)]
    names = ", ".join(name for name, _, _ in videos)
    if max_parallel:
        uses, gives = ", or ".join(tool.usage for tool in tools), ", ".join(tool.effect for tool in tools)
        request = _with_question(
            prompts.with_tool, question, names=names, max_parallel=max_parallel, uses=uses, gives=gives
        )
    else:
        request = _with_question(prompts.without_tool, question, names=names)
    content.append(text_part(request))
    return [{"role": "system", "content": prompts.system.format()}, *past, {"role": "user", "content": content}]


def _past_message(prompts: Prompts, turn: PastTurn, videos: Iterable[ShownTimes]) -> dict[str, Any]:
    pictures = [*turn.num_images * [IMAGE], *_overview_parts(prompts, videos)]
    return {"role": turn.role, "content": [*pictures, text_part(turn.text)] if pictures else turn.text}


def _overview_parts(prompts: Prompts, videos: Iterable[ShownTimes]) -> list[dict[str, Any]]:
    content = []
    for name, duration_s, times_s in videos:
        intro = prompts.overview.format(name=name, duration_s=duration_s, num_frames=len(times_s))
        frames = frame_parts(prompts, times_s)
        content += [text_part(f"{intro}\n"), *frames, text_part("\n")] if intro else frames
    return content


def row_messages(
    prompts: Prompts,
    messages: Sequence[tuple[str, str]],
    times_s: Sequence[Sequence[float]],
    num_images: int,
    escape: Callable[[str], str],
) -> list[dict[str, Any]]:
    """Renders a row's own messages, as in the release, with their texts escaped.

    Each message with a `<video>` has the video's frames before its text; videos without a `<video>` go into the last
    message. The same holds for images and `<image>`. `times_s` has the frame times of each video.
    """
    videos, images, rendered = iter(times_s), iter(num_images * [IMAGE]), []
    for number, (role, text) in enumerate(messages):
        is_last = number == len(messages) - 1
        own = videos if is_last else islice(videos, text.count(PLACEHOLDER))
        frames = [*(images if is_last else islice(images, num_images and text.count(IMAGE_PLACEHOLDER)))]
        frames += [part for video_s in own for part in frame_parts(prompts, video_s)]
        plain = text.replace(PLACEHOLDER, "")
        plain = plain.replace(IMAGE_PLACEHOLDER, "") if num_images else plain
        plain = escape(plain)  # last, because a token may be complete only without the placeholder in it
        rendered.append({"role": role, "content": [*frames, text_part(plain)] if frames else plain})
    return rendered


def _with_question(text: str, question: str, **values: Any) -> str:
    """Fills in the question, or puts it before the text, with a blank line, if the text has no {question}."""
    filled = text.format(question=question, **values)
    has_place = any(name == "question" for _, name, _, _ in Formatter().parse(text))
    return filled if has_place else f"{question}\n\n{filled}"


def subagent_messages(
    prompts: Prompts, window: Window, times_s: Sequence[float], question: str
) -> list[dict[str, Any]]:
    instruction = prompts.subagent_instruction.format(question=question, **window_values(window, len(times_s)))
    return closeup_messages(prompts, window_intro(prompts, window, len(times_s)), times_s, instruction)


def window_values(window: Window, num_frames: int) -> dict[str, Any]:
    return {
        "start_s": window.start_s,
        "end_s": window.end_s,
        "start": clock(window.start_s),
        "end": clock(window.end_s),
        "duration_s": window.end_s - window.start_s,
        "num_frames": num_frames,
    }


def clock(time_s: float | int) -> str:
    """Formats whole seconds as MM:SS; minutes may exceed 59."""
    return f"{int(time_s // 60):02d}:{int(time_s % 60):02d}"


def window_intro(prompts: Prompts, window: Window, num_frames: int) -> str:
    return prompts.subagent_intro.format(**window_values(window, num_frames))


def closeup_messages(prompts: Prompts, intro: str, times_s: Sequence[float], instruction: str) -> list[dict[str, Any]]:
    """Returns a sub-agent's messages: an introduction, frames and an instruction."""
    frames = frame_parts(prompts, times_s) if prompts.subagent_intro else len(times_s) * [IMAGE]
    before, after = ([text_part(f"{intro}\n")], f"\n{instruction}") if intro else ([], instruction)
    message = {"role": "user", "content": [*before, *frames, text_part(after)]}
    system = prompts.subagent_system.format()
    return [{"role": "system", "content": system}, message] if system else [message]
