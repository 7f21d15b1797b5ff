"""Small copies of the public splits with the hub's file names, columns and types, and three questions each.

Videos are empty files unless a test replaces them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout.video.encode import write_video

SRT = '1\n00:00:00,000 --> 00:00:20,000\n<font color="white" size=".72c">The lid comes off.</font>\n'


def videomme_row(number: int, **changed: Any) -> dict[str, Any]:
    video = number // 2
    row = {
        "video_id": f"{video:03d}",
        "duration": ("short", "long")[video],
        "domain": "Knowledge",
        "sub_category": "Law",
        "url": "https://host/watch",
        "videoID": f"fFjv93ACGo{video}",
        "question_id": f"{video:03d}-{number % 2 + 1}",
        "task_type": "Counting Problem",
        "question": "How many lids?",
        "options": ["A. One.", "B. Two.", "C. Three.", "D. None."],
        "answer": "A",
    }
    return row | changed


def longvideobench_row(number: int, **changed: Any) -> dict[str, Any]:
    row = {
        "video_id": f"v{number}",
        "question": "What is poured?",
        **{f"option{n}": text for n, text in enumerate(["Milk", "Tea", "Oil", "Ink", "N/A"])},
        "correct_choice": number % 4,
        "id": f"v{number}_0",
        "video_path": f"v{number}.mp4",
        "subtitle_path": f"v{number}_en.json",
        "duration": 12.5,
        "duration_group": 15,
        "question_category": "S2E",
        "topic_category": "KG-Knowledge-Geography",
        "starting_timestamp_for_subtitles": 0.0,
    }
    return row | changed


def lvbench_row(number: int, **changed: Any) -> dict[str, Any]:
    row = {
        "key": "Cm73ma6Ibcs",
        "uid": str(number),
        "type": "cartoon",
        "video_path": "Cm73ma6Ibcs.mp4",
        "question": "What year\nis shown?\n(A) 1636\n(B) 1366\n(C) 1363\n(D) 1633",
        "answer": "D",
        "time_reference": "00:15-00:19",
        "question_type": ["key information retrieval", "event understanding"][: number + 1],
    }
    return row | changed


def mlvu_row(number: int, **changed: Any) -> dict[str, Any]:
    candidates = ["Yellow", "Red", "Green", "Blue"]
    listed = "\n".join(f"({letter}) {text}" for letter, text in zip("ABCD", candidates, strict=True))
    row = {
        "video_name": ("movie101.mp4", "needle_32")[number % 2],  # some names lack the file extension
        "duration": 480.0,
        "question": f"Which colour?\n{listed}",
        "candidates": candidates,
        "answer": "B",
        "task_type": ("plotQA", "needle")[number % 2],
        "question_id": f"Q{number}",
    }
    return row | changed


def mmvu_row(number: int, **changed: Any) -> dict[str, Any]:
    choices = ["DFS", "BFS", "Sort", "Hash", "Heap"] if number % 2 == 0 else [""] * 5
    row = {
        "id": f"validation_{number}",
        "video": f"https://huggingface.co/datasets/yale-nlp/MMVU/resolve/main/videos/Computer_Science/{number}.mp4",
        "youtube_url": "https://host/watch",
        "question_type": ("multiple-choice", "open-ended")[number % 2],
        "metadata": {"subject": "Computer_Science", "textbook": "T", "knowledge": ["https://host"], "rationale": "R"},
        "question": "Which algorithm?",
        "choices": dict(zip("ABCDE", choices, strict=True)),
        "answer": ("A", " depth-first search ")[number % 2],
    }
    return row | changed


def charades_row(number: int, **changed: Any) -> dict[str, Any]:
    return {"video": "3MSZA.mp4", "caption": "person turn a light on.", "timestamp": [24.3, 30.4 + number]} | changed


ROWS = {
    "videomme": videomme_row,
    "videomme_subtitles": videomme_row,
    "longvideobench": longvideobench_row,
    "lvbench": lvbench_row,
    "mlvu": mlvu_row,
    "mmvu": mmvu_row,
    "charades": charades_row,
}
FILES = {
    "videomme": "videomme/test-00000-of-00001.parquet",
    "videomme_subtitles": "videomme/test-00000-of-00001.parquet",
    "longvideobench": "validation-00000-of-00001.parquet",
    "lvbench": "data/train-00000-of-00001.parquet",
    "mlvu": "mlvu/test-00000-of-00001.parquet",
    "mmvu": "validation.json",
    "charades": "data/test-00000-of-00001.parquet",
}
VIDEOS = {
    "videomme": ["data/fFjv93ACGo0.mp4", "data/fFjv93ACGo1.MP4"],
    "videomme_subtitles": ["data/fFjv93ACGo0.mp4", "data/fFjv93ACGo1.MP4"],
    "longvideobench": [f"videos/v{number}.mp4" for number in range(3)],
    "lvbench": ["video_chunks/Cm73ma6Ibcs.mp4"],
    "mlvu": ["movie101.mp4", "needle_32.mp4"],
    "mmvu": [f"videos/Computer_Science/{number}.mp4" for number in range(3)],
    "charades": ["Charades_v1_480/3MSZA.mp4"],
}


def write_rows(name: str, root: Path, rows: list[dict[str, Any]]) -> Path:
    """Writes rows to the split's file in the hub's layout."""
    file = root / FILES[name]
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".json":
        file.write_text(json.dumps(rows))
        return file
    table = pa.Table.from_pylist(rows)
    if name == "charades":  # half precision, as on the hub
        column = table.schema.get_field_index("timestamp")
        times_s = pa.array([row["timestamp"] for row in rows], pa.list_(pa.float16()))
        table = table.set_column(column, "timestamp", times_s)
    pq.write_table(table, file)
    return file


def make_copy(name: str, root: Path, num_rows: int = 3, **changed: Any) -> Path:
    """Makes a directory as after `hf download`, with unpacked archives; `changed` overrides columns in every row."""
    write_rows(name, root, [ROWS[name](number, **changed) for number in range(num_rows)])
    for video in VIDEOS[name]:
        (root / video).parent.mkdir(parents=True, exist_ok=True)
        (root / video).touch()
    if name == "videomme_subtitles":
        (root / "subtitle").mkdir(exist_ok=True)
        (root / "subtitle" / "fFjv93ACGo0.srt").write_text(SRT)
    return root


def write_film(path: Path) -> Path:
    """Writes a video of 66 frames, so that the release's overview has 64."""
    write_video(path, (np.full((48, 64, 3), number, np.uint8) for number in range(66)), 25)
    return path


def make_copy_with(film: Path, name: str, root: Path, num_rows: int = 3) -> Path:
    """Makes a copy whose videos are real."""
    make_copy(name, root, num_rows)
    for video in [*root.rglob("*.mp4"), *root.rglob("*.MP4")]:
        shutil.copy(film, video)
    return root
