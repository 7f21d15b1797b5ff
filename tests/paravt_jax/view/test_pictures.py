"""Thumbnails of prompts: each stored once, complete strips only, up to the size limit."""

import base64
import io

import pytest
from make_video import at_fps, write_video
from PIL import Image

from paravt_jax.view import pictures
from paravt_jax.view.pictures import HEIGHT_PX, WIDTH_PX, Album, Strip, make_album, thumbnail_size


def episode(path, *crops, frames_s=(0.0, 0.5, 1.0)) -> dict:
    calls = [{"frames_s": list(times), "video": 0, "box": box} for times, box in crops]
    return {"videos": [{"path": str(path), "frames_s": list(frames_s)}], "turns": [{"calls": calls}]}


@pytest.fixture(scope="module")
def video(tmp_path_factory):
    return write_video(tmp_path_factory.mktemp("video") / "a.mp4", at_fps(10, 20))


@pytest.mark.slow
def test_overviews_and_crops_have_pictures_and_share_equal_frames(video):
    episodes = [episode(video, ((0.5, 0.8), None), ((0.5,), [0, 0, 0.5, 0.5])), episode(video)]
    album = make_album(episodes)
    (crop, detail), overview = episodes[0]["turns"][0]["calls"], episodes[0]["videos"][0]
    assert len(album.pictures) == 5 and album.num_left_out == 0
    assert crop["pictures"][0] == overview["pictures"][1] != detail["pictures"][0]
    assert episodes[1]["videos"][0]["pictures"] == overview["pictures"]
    image = Image.open(io.BytesIO(base64.b64decode(album.pictures[0])))
    assert image.size <= (WIDTH_PX, HEIGHT_PX) and image.format == "WEBP"


@pytest.mark.slow
def test_frames_in_a_response_have_pictures_in_their_order_also_of_several_videos_and_boxes(video):
    shown = [[str(video), None, [0.5]], [str(video), [0, 0, 0.5, 0.5], [0.5]], [str(video), None, [1.0, 0.0]]]
    of_page = episode(video, frames_s=(0.0, 1.0))
    of_page["turns"][0]["calls"] = [call := {"frames_s": [0.5, 0.5, 1.0, 0.0], "shown": shown, "video": None}]
    album = make_album([of_page])
    assert len(call["pictures"]) == 4 and len({*call["pictures"]}) == 4 and len(album.pictures) == 4
    assert call["pictures"][2:] == of_page["videos"][0]["pictures"][::-1]


@pytest.mark.slow
def test_the_longest_strips_are_omitted_first_and_counted(video, monkeypatch):
    episodes = [episode(video, ((1.5, 1.6), None))]
    complete = make_album(episodes)
    monkeypatch.setattr(pictures, "MAX_BYTES", complete.num_bytes - 1)
    album = make_album(episodes)
    assert episodes[0]["videos"][0]["pictures"] is None and len(episodes[0]["turns"][0]["calls"][0]["pictures"]) == 2
    assert (len(album.pictures), album.num_left_out) == (2, 3) and album.num_bytes < complete.num_bytes


@pytest.mark.slow
def test_missing_and_changed_videos_are_reported(video, tmp_path):
    album = make_album([episode(tmp_path / "gone.mp4"), episode(video, frames_s=(0.0, 1.90, 1.95))])
    assert album.pictures == [] and len(album.problems) == 2
    assert "gone.mp4" in album.problems[0] and album.problems[1] == "a.mp4: the file has changed"


def test_existing_pictures_need_no_video():
    episodes = [episode("/gone.mp4", ((4.0,), None))]
    album = Album.of(dict.fromkeys(Strip("/gone.mp4", (0.0, 0.5, 1.0)).keys, "AAAA"), episodes)
    assert episodes[0]["videos"][0]["pictures"] == [0, 1, 2]
    assert episodes[0]["turns"][0]["calls"][0]["pictures"] is None and album.num_bytes == 12


@pytest.mark.parametrize(
    ("size", "expected"), [((720, 1280), (72, 128)), ((1280, 720), (72, 40)), ((20, 30), (20, 30))]
)
def test_a_thumbnail_keeps_the_shape_of_its_frame(size, expected):
    assert thumbnail_size(*size) == expected
