"""The HTML page of a question: the answer, its evidence, and the episode with its frames."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from paravt_jax.asking.answerer import Answer, Answerer
from paravt_jax.run.directory import versions
from paravt_jax.view.page import question_page
from paravt_jax.view.pictures import Strip, thumbnail
from rollout.parts import TIME_DIGITS
from rollout.picture import Picture
from rollout.records import Episode
from rollout.video.box import Box
from rollout.video.info import TimedPicture


def page_of(answer: Answer, answerer: Answerer, model: str) -> bytes:
    settings = {"config": {"model": {"path": model}, "rollout": asdict(answerer.agent.config)}, **versions()}
    seconds = answer.seconds
    answer_data = {
        "text": answer.text,
        "evidence": [[evidence.video, evidence.start_s, evidence.end_s] for evidence in answer.evidence],
        "seconds": {"overview": seconds.overview, "thinking": sum(seconds.turns), "calls": sum(seconds.calls)},
    }
    return question_page(settings, answer.episode.to_record(), answer_data, _thumbnails(answer.episode))


def _thumbnails(episode: Episode) -> dict[str, str]:
    """Thumbnails of the episode's frames, by the keys of frame strips in the record."""
    record: dict[str, Any] = episode.to_record()
    strips = [Strip(video["path"], tuple(video["frames_s"])) for video in record["videos"]]
    pictures: list[tuple[str, Picture]] = []
    overview = [key for strip in strips for key in strip.keys]
    shown = episode.ledger.segments[0].pictures
    pictures += zip(overview, shown[len(shown) - len(overview) :], strict=True)  # images of the question come first
    for call in episode.calls:
        if call.report is not None:
            pictures += zip(_strip(call.path, call.frames_s, call.box).keys, call.report.pictures, strict=True)
        for frame in call.parts:
            if isinstance(frame, TimedPicture):
                pictures += zip(_strip(frame.path, [frame.time_s], frame.box).keys, [frame.picture], strict=True)
    return {key: thumbnail(picture.pixels) for key, picture in pictures}


def _strip(path: str, times_s: Sequence[float | int], box: Box | None) -> Strip:
    return Strip(path, tuple(round(float(time_s), TIME_DIGITS) for time_s in times_s), box)
