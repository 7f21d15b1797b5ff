"""What the agents are told, and how frames are shown: each after its time, in seconds."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from string import Formatter
from typing import Any

from rollout.tools import CROP_VIDEO_SPEC, ToolSpec, Window

# What may stand in braces in a text, each with a value to try it with. In a text that is not here nothing may.
PLACEHOLDERS: Mapping[str, Mapping[str, Any]] = {
    "frame_time": {"time_s": 0.0},
    "overview": {"name": "", "duration_s": 0.0, "num_frames": 0},
    "with_tool": {"uses": "", "gives": "", "max_parallel": 0, "question": "", "names": ""},
    "without_tool": {"question": "", "names": ""},
    "subagent_intro": {"start_s": 0.0, "end_s": 0.0, "num_frames": 0},
    "subagent_instruction": {"question": ""},
}
MAX_TEXT_CHARS = 100_000  # as rows of data may have
MAX_PLACEHOLDERS = 64  # of a text, since each may stand for as much as a question
MAX_SHOWN = 60  # characters of a format that is refused
MAX_WIDTH = 100  # of a number that is filled in: a model's file may ask for two billion


@dataclass(frozen=True)
class Prompts:
    """The texts; a brace of their own is written twice. A model should be asked in the words it was trained with."""

    # the main agent is told first
    system: str = "You are a helpful assistant who answers questions about long videos."
    system_has_tools: bool = False  # that text says which tools there are: the chat template is not given them again
    frame_time: str = "<{time_s:.1f} seconds>"  # before every frame
    # before the frames of each video; empty: nothing
    overview: str = "{name}: {duration_s:.1f} seconds, {num_frames} frames of it:"
    # after the question, or with {question} in its place; where calls can be made
    with_tool: str = (
        "Think first, between <think> and </think>. Where the frames do not show enough, call {uses}, up to "
        "{max_parallel} calls in one turn: {gives}. When you know, give the answer between <answer> and </answer>."
    )
    # likewise, where none can
    without_tool: str = (
        "Think first, between <think> and </think>, then give the answer between <answer> and </answer>."
    )
    # a sub-agent is told first
    subagent_system: str = "You are a helpful assistant who looks closely at a part of a video."
    # before the frames of a window
    subagent_intro: str = "The part of the video from {start_s:.1f} to {end_s:.1f} seconds, {num_frames} frames of it:"
    subagent_instruction: str = (  # may contain {question}
        "Summarise what happens in this part, with the times at which it happens. Say only what the frames show."
    )
    # after the responses to the last calls that can be made
    last_turn: str = "This was the last call. Answer now."

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if problem := placeholder_problem(name, value):
                raise ValueError(f"rollout.prompts.{problem}")


def placeholder_problem(name: str, text: Any) -> str:
    """What is wrong with the braces of a text; empty: nothing."""
    if not isinstance(text, str):
        return ""
    if len(text) > MAX_TEXT_CHARS:
        return f"{name} has {len(text)} characters, more than {MAX_TEXT_CHARS}"
    known = PLACEHOLDERS.get(name, {})
    there_are = ", ".join(f"{{{one}}}" for one in known) or "none"
    try:
        found = [(one, spec or "") for _, one, spec, _ in Formatter().parse(text) if one is not None]
        if len(found) > MAX_PLACEHOLDERS:
            return f"{name} has {len(found)} placeholders, more than {MAX_PLACEHOLDERS}"
        unknown = [one for one, _ in found if one not in known]
        if wide := [spec for _, spec in found if _is_wide(spec)]:
            return (
                f"{name} has the format {wide[0][:MAX_SHOWN]!r}; its numbers may be at most {MAX_WIDTH}, and it may "
                f"have no braces"
            )
        if not unknown:
            text.format(**known)
            return ""
        problem = f"has the placeholder {{{unknown[0]}}}"
    except (ValueError, LookupError, TypeError, AttributeError) as said:
        problem = f"cannot be filled in: {said}"
    return f"{name} {problem}; there it may have {there_are}, and a brace of its own is written twice"


def _is_wide(spec: str) -> bool:
    numbers = re.findall(r"\d+", spec)
    return "{" in spec or any(len(number) > len(str(MAX_WIDTH)) or int(number) > MAX_WIDTH for number in numbers)


def _placeholders(text: str) -> list[str]:
    return [name for _, name, _, _ in Formatter().parse(text) if name is not None]


def read_prompts(path: str | Path) -> Prompts:
    """The texts of a YAML file with keys of Prompts; what it leaves out has its default."""
    from omegaconf import OmegaConf  # late: without a file nobody needs them
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    told = f"rollout.prompts_file={path}"
    try:
        layer = OmegaConf.to_container(OmegaConf.load(path))
    except OSError as problem:
        raise ValueError(f"{told}: {problem.strerror}") from None
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as problem:
        raise ValueError(f"{told} is no YAML: {' '.join(str(problem).split())}") from None
    if not isinstance(layer, dict):
        raise ValueError(f"{told} is {type(layer).__name__}, expected texts such as system: You watch videos.")
    kinds = {field.name: type(field.default) for field in fields(Prompts)}
    for name, value in layer.items():
        if name not in kinds:
            raise ValueError(f"{told}: {name} is no prompt; there are {', '.join(kinds)}")
        if type(value) is not kinds[name]:
            expected = "text" if kinds[name] is str else "true or false"
            raise ValueError(f"{told}: {name} is {type(value).__name__}, expected {expected}")
        if problem := placeholder_problem(name, value):
            raise ValueError(f"{told}: {problem}")
    return Prompts(**{str(name): value for name, value in layer.items()})


def prompts_of(file: str, beside: Prompts) -> Prompts:
    """The texts of a file. Those set `beside` it must be the defaults, or, as in the record of a run, the file's."""
    texts = read_prompts(file)
    if beside in (Prompts(), texts):
        return texts
    set_too = [f"rollout.prompts.{name}" for name, value in asdict(beside).items() if value != getattr(Prompts, name)]
    raise ValueError(
        f"rollout.prompts_file={file} and {', '.join(set_too)} are both set; write the text into the file, or leave "
        f"one of them out"
    )


def frame_parts(prompts: Prompts, times_s: Sequence[float]) -> list[dict[str, Any]]:
    """Content parts of a message: every frame's time as text, then its picture."""
    parts = []
    for time_s in times_s:
        parts += [text_part(prompts.frame_time.format(time_s=time_s)), {"type": "image"}]
    return parts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def main_messages(
    prompts: Prompts,
    videos: Sequence[tuple[str, float, Sequence[float]]],
    question: str,
    max_parallel: int,
    tools: Sequence[ToolSpec] = (CROP_VIDEO_SPEC,),
) -> list[dict[str, Any]]:
    """The main agent's dialogue; a video is its name, its duration and the times of its frames.

    `max_parallel` 0 means that there is no tool.
    """
    content = []
    for name, duration_s, times_s in videos:
        intro = prompts.overview.format(name=name, duration_s=duration_s, num_frames=len(times_s))
        frames = frame_parts(prompts, times_s)
        content += [text_part(f"{intro}\n"), *frames, text_part("\n")] if intro else frames
    names = ", ".join(name for name, _, _ in videos)
    if max_parallel:
        uses, gives = ", or ".join(tool.usage for tool in tools), ", ".join(tool.effect for tool in tools)
        asked = _asked(prompts.with_tool, question, names=names, max_parallel=max_parallel, uses=uses, gives=gives)
    else:
        asked = _asked(prompts.without_tool, question, names=names)
    content.append(text_part(asked))
    return [{"role": "system", "content": prompts.system.format()}, {"role": "user", "content": content}]


def _asked(text: str, question: str, **values: Any) -> str:
    """The question with what is told beside it: after a blank line, unless the text says where the question stands."""
    said = text.format(question=question, **values)
    return said if "question" in _placeholders(text) else f"{question}\n\n{said}"


def subagent_messages(
    prompts: Prompts, window: Window, times_s: Sequence[float], question: str
) -> list[dict[str, Any]]:
    """The dialogue of a sub-agent about a window."""
    intro = prompts.subagent_intro.format(start_s=window.start_s, end_s=window.end_s, num_frames=len(times_s))
    return shown_messages(prompts, intro, times_s, prompts.subagent_instruction.format(question=question))


def shown_messages(prompts: Prompts, intro: str, times_s: Sequence[float], instruction: str) -> list[dict[str, Any]]:
    """The dialogue of any sub-agent: what it is shown, and what it is to do with it."""
    content = [text_part(f"{intro}\n"), *frame_parts(prompts, times_s), text_part(f"\n{instruction}")]
    return [{"role": "system", "content": prompts.subagent_system.format()}, {"role": "user", "content": content}]
