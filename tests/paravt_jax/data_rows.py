"""Rows in the published layout (questions for RL, dialogues for SFT), and functions that write them to files."""

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

CALL = '<tool_call>{"name": "crop_video", "arguments": {"start_time": 1, "end_time": 2}}</tool_call>'
CALL_TURN = f"<think>\nI look closer.\n</think>\n{CALL}"
ANSWER_TURN = "<think>\nIt is red.\n</think>\n<answer>B</answer>"


def rl_row(answer="B", question_type="mcq", *, video="a.mp4", question="<video>\nWhich one?", **columns) -> dict:
    return {
        "prompt": [{"role": "user", "content": question}],
        "videos": [{"video": video}],
        "extra_info": json.dumps({"answer": answer, "question_type": question_type}),
        **columns,
    }


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def media(kind: str, url: object, **options: object) -> dict:
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url, **options}}


def messages(*pairs: tuple[str, object]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in pairs]


def dialogue(*contents: object) -> list[dict]:
    """Returns a question and a turn, followed by a tool response and a turn for each content."""
    roles = ["user", "assistant", *["tool", "assistant"] * len(contents)]
    return messages(*zip(roles, contents, strict=False))


def sft_row(content: object = None, **columns: object) -> dict:
    question = [media("video", "a.mp4"), text("Which one?")]
    return {"messages": dialogue(question, ANSWER_TURN) if content is None else content, **columns}


def write_lines(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path
