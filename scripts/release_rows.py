"""Rows, videos and replies for scripts.release_goldens, in the layout that the released evaluation reads."""

import json
from typing import Any

VIDEOS = {  # height, width, frames per second, frames
    "wide.mp4": (240, 320, 25, 400),
    "hd.mp4": (720, 1280, 30, 66),
    "odd.mp4": (362, 206, 24, 100),
    "short.mp4": (240, 426, 30, 40),
}
FILES = {  # path at which the release looks for a video -> the video
    "videomme/data/wide.mp4": "wide.mp4",
    "videomme/data/short.mp4": "short.mp4",
    "datasets/longvideobench/videos/hd.mp4": "hd.mp4",
    "datasets/longvideobench/videos/odd.mp4": "odd.mp4",
    "lvbench/wide.mp4": "wide.mp4",
    "lvbench/odd.mp4": "odd.mp4",
    "MLVU/video/odd.mp4": "odd.mp4",
    "MLVU/video/short.mp4": "short.mp4",
    "mmvu/videos/Law/wide.mp4": "wide.mp4",
    "mmvu/videos/Law/odd.mp4": "odd.mp4",
    "charades_sta/Charades_v1_480/wide.mp4": "wide.mp4",
    "charades_sta/Charades_v1_480/short.mp4": "short.mp4",
}
SUBTITLES = {
    "videomme/subtitle/wide.srt": "\ufeff1\n00:00:00,000 --> 00:00:02,000\n<i>The lid</i>\ncomes off.\n\n"
    "2\n00:00:02,000\n\n3\n00:00:05,000 --> 00:00:09,000\n <b> </b>\n{Braces} stay.\n"
}
REPOSITORIES = {
    "lmms-lab/Video-MME": "videomme",
    "longvideobench/LongVideoBench": "longvideobench",
    "lmms-lab/LVBench": "lvbench",
    "sy1998/MLVU_dev": "mlvu",
    "yale-nlp/MMVU": "mmvu",
    "lmms-lab/charades_sta": "charades",
}


def _videomme(video: str, **changed: Any) -> dict[str, Any]:
    row = {
        "videoID": video,
        "question_id": f"{video}-1",
        "question": "How many  lids {are} there?",
        "options": ["A. One.", "B. Two.", "C. Three.", "D. None."],
        "answer": "B",
    }
    return row | dict.fromkeys(("duration", "domain", "sub_category", "task_type"), "x") | changed


def _longvideobench(video: str, options: list[str], **changed: Any) -> dict[str, Any]:
    names = {f"option{number}": (options + ["N/A"] * 5)[number] for number in range(5)}
    row = {"id": f"{video}_0", "video_path": f"{video}.mp4", "question": "What is poured?", "correct_choice": 1}
    return row | names | {"duration_group": 15, "question_category": "S2E"} | changed


def _lvbench(video: str, **changed: Any) -> dict[str, Any]:
    row = {"uid": video, "video_path": f"{video}.mp4", "type": "cartoon", "question_type": ["summary"], "answer": "B"}
    return row | {"question": "What year\nis shown?\n(A) 1636\n(B) 1366\n(C) 1363"} | changed


def _mlvu(video: str, **changed: Any) -> dict[str, Any]:
    row = {"video_name": f"{video}.mp4", "candidates": [" Red", "Green ", "Blue"], "answer": "Green"}
    return row | {"question": "Which color?\n(A) Red\n(B) Green\n(C) Blue", "task_type": "plotQA"} | changed


def _mmvu(video: str, choices: list[str], **changed: Any) -> dict[str, Any]:
    row = {
        "id": f"validation_{video}",
        "video": f"https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Law/{video}.mp4",
        "question_type": "multiple-choice" if choices[0] else "open-ended",
        "metadata": {"subject": "Law"},
        "question": "Which rule? See the Video Path above." if choices[0] else "Which rule?",
        "choices": dict(zip("ABCDE", choices, strict=True)),
    }
    return row | {"answer": "B" if choices[0] else " B"} | changed


def _charades(video: str, caption: str) -> dict[str, Any]:
    return {"video": f"{video}.mp4", "caption": caption, "timestamp": [1.2998046875, 5.6015625]}


ROWS: dict[str, list[dict[str, Any]]] = {
    "videomme": [_videomme("wide"), _videomme("short")],
    "videomme_subtitles": [_videomme("wide"), _videomme("short")],
    "longvideobench": [_longvideobench("odd", ["Milk", "Tea", "Oil"]), _longvideobench("hd", list("VWXYZ"))],
    "lvbench": [_lvbench("odd"), _lvbench("wide")],
    "mlvu": [_mlvu("odd"), _mlvu("short", answer="B")],
    "mmvu": [_mmvu("wide", ["DFS", "BFS", "Sort", "Heap", ""]), _mmvu("odd", [""] * 5)],
    "charades": [_charades("wide", 'person "opens" a {door}.'), _charades("short", "person sits.")],
}


def _call(**arguments: Any) -> str:
    call = {"name": "crop_video", "arguments": {"video_path": "v.mp4"} | arguments}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


ANSWER = "<think>Seen.</think><answer>B</answer> The event happens in the 2.0 - 5.5 seconds."
ONE_CHANNEL = "two_calls"  # for further rows
REPLIES: dict[str, list[str]] = {
    "two_calls": [
        "<think>Closer.</think>" + _call(start_time=0.5, end_time=2) + _call(start="00:01", end="0:0:02.2"),
        ANSWER,
    ],
    "bad_window": [
        _call(start_time=2, end_time=1)
        + _call(start_time=900, end_time=950)
        + _call(start_time="soon", end_time=[1])
        + "<tool_call>{broken</tool_call>"
        + _call(start_time=-3, end_time=1e9),
        "The answer is C, from 0:01 to 0:02.",
    ],
    "leaked_code": [
        "<tool_code>crop_video(video_path='v, w.mp4', start_time = 0.0, end_time=\"1.5\")</tool_code>"
        "<tool_code>print(1)</tool_code><tool_code>crop_video(start=00:01)</tool_code>",
        "It starts at 1.5 and ends at 2.5, so A",
    ],
    "six_calls": [
        _call(start_time=0, end_time=1)
        + _call(start_time=1, end_time=1.05)
        + _call(start_time=0.51, end_time=0.55)
        + _call(start_time=1)
        + _call(end_time=1.3)
        + _call(start_time=0, end_time=2),
        ANSWER,
    ],
    "three_turns": [_call(start_time=0, end_time=0.7), _call(), _call(start_time=0.2, end_time=1.2), "B 00:02 - 00:04"],
    "no_answer": ["I cannot tell."],
}
