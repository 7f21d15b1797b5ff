"""A tool's response: a text, or a list of texts, frames and other pictures in the order that the model sees."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollout.picture import Picture
from rollout.prompts import Prompts, text_part
from rollout.video.info import TimedPicture

TIME_DIGITS = 6  # precise enough to find the same frame again

Shown = TimedPicture | Picture
Part = str | Shown
Response = str | Sequence[Part]


def with_times(response: Response, prompts: Prompts) -> tuple[Part, ...]:
    """Returns the response's parts with each frame's time before the frame, as in prompts."""
    parts: list[Part] = []
    for part in [response] if isinstance(response, str) else response:
        if isinstance(part, TimedPicture):
            parts.append(prompts.frame_time.format(time_s=part.time_s))
        parts.append(part)
    return tuple(parts)


def text_of(parts: Iterable[Part]) -> str:
    return "".join(part for part in parts if isinstance(part, str))


def content_of(response: Response, escape: Callable[[str], str]) -> str | list[dict[str, Any]]:
    """Converts a response into a message's content. Joins consecutive texts before escaping them."""
    if not shown_in(response):
        return escape(text_of(response))
    content: list[dict[str, Any]] = []
    for is_text, run in itertools.groupby(response, lambda part: isinstance(part, str)):
        parts = list(run)
        content += [text_part(escape(text_of(parts)))] if is_text else [{"type": "image"}] * len(parts)
    return content


def cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def pictures_of(parts: Iterable[Part]) -> tuple[Picture, ...]:
    return tuple(shown if isinstance(shown, Picture) else shown.picture for shown in shown_in(parts))


def shown_in(parts: Iterable[Part]) -> tuple[Shown, ...]:
    return tuple(part for part in parts if not isinstance(part, str))


def shown_records(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Returns a record for each picture: how to read the frame again, or the picture itself if it is not a frame."""
    return list(map(_shown_record, shown_in(parts)))


def _shown_record(shown: Shown) -> dict[str, Any]:
    if isinstance(shown, TimedPicture) and shown.path:
        time_s = round(float(shown.time_s), TIME_DIGITS)
        return {"key": shown.picture.key, "time_s": time_s, "path": shown.path, "box": shown.box}
    (picture,) = pictures_of([shown])
    return {"key": picture.key, "png": picture.png_base64}
