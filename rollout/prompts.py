"""What the agents are told, and how frames are shown: each after its time, in seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout.tools import CROP_VIDEO, Window


@dataclass(frozen=True)
class Prompts:
    """The texts. A model trained with one wording should be served and evaluated with the same."""

    # the main agent is told first
    system: str = "You are a helpful assistant who answers questions about long videos."
    frame_time: str = "<{time_s:.1f} seconds>"  # before every frame
    # before the frames of each video
    overview: str = "{name}: {duration_s:.1f} seconds, {num_frames} frames of it:"
    # after the question, where calls can be made
    with_tool: str = (
        "Think first, between <think> and </think>. Where the frames do not show enough, call "
        f"{CROP_VIDEO} on the parts of the video that matter, up to {{max_parallel}} calls in one turn: each part is "
        "looked at closely and reported on. When you know, give the answer between <answer> and </answer>."
    )
    # after the question, where none can
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
    # before a report on a window whose end was cut off
    clamped: str = "The video ends at {end_s:.1f} seconds, so the part from {start_s:.1f} to {end_s:.1f} was looked at."
    # in place of a report
    error: str = "Error: {message}."


def frame_parts(prompts: Prompts, times_s: Sequence[float]) -> list[dict[str, Any]]:
    """Content parts of a message: every frame's time as text, then its picture."""
    parts = []
    for time_s in times_s:
        parts += [text_part(prompts.frame_time.format(time_s=time_s)), {"type": "image"}]
    return parts


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def main_messages(
    prompts: Prompts, videos: Sequence[tuple[str, float, Sequence[float]]], question: str, max_parallel: int
) -> list[dict[str, Any]]:
    """The main agent's dialogue; a video is its name, its duration and the times of its frames.

    `max_parallel` 0 means that there is no tool.
    """
    content = []
    for name, duration_s, times_s in videos:
        intro = prompts.overview.format(name=name, duration_s=duration_s, num_frames=len(times_s))
        content += [text_part(f"{intro}\n"), *frame_parts(prompts, times_s), text_part("\n")]
    task = prompts.with_tool.format(max_parallel=max_parallel) if max_parallel else prompts.without_tool
    content.append(text_part(f"{question}\n\n{task}"))
    return [{"role": "system", "content": prompts.system}, {"role": "user", "content": content}]


def subagent_messages(
    prompts: Prompts, window: Window, times_s: Sequence[float], question: str
) -> list[dict[str, Any]]:
    intro = prompts.subagent_intro.format(start_s=window.start_s, end_s=window.end_s, num_frames=len(times_s))
    instruction = prompts.subagent_instruction.replace("{question}", question)
    content = [text_part(f"{intro}\n"), *frame_parts(prompts, times_s), text_part(f"\n{instruction}")]
    return [{"role": "system", "content": prompts.subagent_system}, {"role": "user", "content": content}]
