"""Records the requests of the released evaluation, whose driver runs against a recording endpoint on this machine.

python -m scripts.release_goldens --release DIR --dst tests/paravt_jax/evaluation/release_golden.json

DIR is a copy of the released repository. Needs `pip install qwen-vl-utils==0.0.14 torchvision==0.25.0 decord openai`;
data sets are replaced by the rows below, in the published layout. The driver runs twice: with its own texts, of which
only hashes are recorded, and with stand-in texts, so that a test can compare texts without the release.
"""

import argparse
import ast
import base64
import hashlib
import importlib
import io
import json
import os
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from model_port.cli import run_cli
from paravt_jax.evaluation.release.source import COMMIT, DRIVER, LOADERS, SCHEMA, read_release, text_nodes
from rollout.endpoint.words import JPEG_URL
from rollout.video.encode import write_video
from scripts.release_rows import FILES, ONE_CHANNEL, REPLIES, REPOSITORIES, ROWS, SUBTITLES, VIDEOS

MODES = ("direct", "reasoning", "agentic_general", "agentic_minimal")
SINGLE_TURN = MODES[:2]
CHANNELS = ("image_url", "video_url")
DATA_SETS = {"videomme_subtitles": "videomme_wsub"}
STAND_IN_SCHEMA = '{"stand": {"in": 1}}'
FIRST_TEXTS, SECOND_TEXTS = "stand-in", "release"


class Recorder(BaseHTTPRequestHandler):
    """An endpoint that answers with scripted replies, in order, and keeps the requests."""

    replies: Sequence[str] = ()
    requests: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Recorder.requests.append(body)
        reply = {"role": "assistant", "content": Recorder.replies[len(Recorder.requests) - 1]}
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        answer = {
            "id": "1",
            "object": "chat.completion",
            "created": 0,
            "model": "m",
            "choices": [choice],
        }
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def make_files(root: Path) -> None:
    """Writes the videos and subtitles to the directories in which the release expects them."""
    for name, (height, width, fps, num_frames) in VIDEOS.items():
        picture = (np.indices((height, width, 3)).sum(0) % 256).astype(np.uint8)
        write_video(root / name, (np.roll(picture, number, 1) for number in range(num_frames)), fps)
    for path, video in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).symlink_to(root / video)
    for path, text in SUBTITLES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def stand_in_source(release: Path) -> dict[str, str]:
    """Returns the release's two source files with stand-ins for all texts."""
    trees = {name: ast.parse((release / name).read_bytes()) for name in (DRIVER, LOADERS)}
    for name, node in text_nodes(trees[DRIVER], trees[LOADERS]).items():
        if isinstance(node, ast.JoinedStr):
            for number, part in enumerate(node.values):
                if isinstance(part, ast.Constant):
                    part.value = f"[{name} {number}]\n"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = f"[{name}] {{tool_schema}} {{{{}}}}" if "{tool_schema}" in node.value else f"[{name}]"
        elif name == SCHEMA:
            _replace(trees[DRIVER], node, ast.Constant(value=STAND_IN_SCHEMA))
    return {name: ast.unparse(ast.fix_missing_locations(tree)) for name, tree in trees.items()}


def _replace(tree: ast.Module, old: ast.expr, new: ast.expr) -> None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and node.value is old:
            node.value = new


def load_driver(sources: dict[str, str], directory: Path) -> tuple[Any, Any]:
    for name, source in sources.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(source)
    for name in [name for name in sys.modules if name.split(".")[0] == "paravt"]:
        del sys.modules[name]
    sys.path.insert(0, str(directory))
    try:
        return importlib.import_module("paravt.eval.driver"), importlib.import_module("paravt.eval.utils")
    finally:
        sys.path.remove(str(directory))


def stub_datasets(root: Path) -> None:
    """Replaces `load_dataset` with one that returns this repository's rows of the split."""
    datasets: Any = types.ModuleType("datasets")
    datasets.load_dataset = lambda repository, *_, **__: ROWS[REPOSITORIES[repository]]
    sys.modules["datasets"] = datasets
    os.environ |= {"PARAVT_MLVU_VIDEO_DIR": f"{root}/MLVU/video", "PARAVT_MMVU_VIDEO_DIR": f"{root}/mmvu"}


def cases() -> Iterator[tuple[str, int, str, str, str]]:
    """Yields split, row, mode, channel and script of each dialogue."""
    for split, rows in ROWS.items():
        for mode in MODES:
            for row in range(len(rows)):
                for channel in CHANNELS[: 1 if row else 2]:
                    scripts = ("no_answer",) if mode in SINGLE_TURN else (ONE_CHANNEL,) if row else tuple(REPLIES)
                    yield from ((split, row, mode, channel, script) for script in scripts)


def record(driver: Any, utils: Any, root: Path, url: str) -> list[dict[str, Any]]:
    from openai import OpenAI

    client = OpenAI(api_key="EMPTY", base_url=url, max_retries=0)
    dialogues = []
    for split, row, mode, channel, script in cases():
        samples = utils.load_samples(DATA_SETS.get(split, split), str(root), prompt_mode=mode)
        Recorder.replies, Recorder.requests = REPLIES[script], []
        result = driver.eval_one(client, "m", samples[row], 64, 3, mode, 5, 2048, channel)
        if "error" in result:
            raise RuntimeError(f"{split}, {mode}, {channel}, {script}: {result['error']}")
        case = {"split": split, "row": row, "mode": mode, "channel": channel, "script": script}
        dialogues.append(case | summary(Recorder.requests) | {"score": result["score"]})
    return dialogues


def summary(requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the messages of the last request; every other request must be a prefix of it."""
    *earlier, last = requests
    for request in earlier:
        if request["messages"] != last["messages"][: len(request["messages"])]:
            raise RuntimeError("a request does not continue the one before")
    settings = {
        tuple(sorted((key, value) for key, value in r.items() if key not in ("messages", "max_tokens")))
        for r in requests
    }
    if settings != {(("model", "m"), ("temperature", 0))}:
        raise RuntimeError(f"requests have other settings: {settings}")
    return {
        "limits": [[len(request["messages"]), request["max_tokens"]] for request in requests],
        "messages": [[message["role"], *parts_of(message["content"])] for message in last["messages"]],
    }


def parts_of(content: Any) -> list[str]:
    """Returns a message's parts: `=HASH` for plain-text content, `text HASH`, `64 x 392x280`, `video NAME`."""
    if isinstance(content, str):
        return [f"={text_hash(content)}"]
    parts: list[str] = []
    for part in content:
        match part:
            case {"type": "text", "text": text}:
                parts.append(f"text {text_hash(text)}")
            case {"type": "image_url", "image_url": {"url": url}}:
                image = Image.open(io.BytesIO(base64.b64decode(url.removeprefix(JPEG_URL))))
                parts.append("{}x{}".format(*image.size))
            case {"type": "video_url", "video_url": {"url": url}}:
                parts.append(f"video {Path(url).name}")
            case _:
                raise RuntimeError(f"unknown part {str(part)[:80]}")
    return run_lengths(parts)


def run_lengths(parts: Sequence[str]) -> list[str]:
    """Replaces runs of equal parts with their count."""
    counted: list[tuple[int, str]] = []
    for part in parts:
        same = bool(counted) and counted[-1][1] == part
        counted[-1 if same else len(counted) :] = [((counted[-1][0] if same else 0) + 1, part)]
    return [f"{count} x {part}" if count > 1 else part for count, part in counted]


def text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def both_hashes(first: Any, second: Any) -> Any:
    """Merges two runs' records: keeps both hashes, and requires everything else to be equal."""
    if isinstance(first, dict):
        return {key: both_hashes(value, second[key]) for key, value in first.items()}
    if isinstance(first, list):
        return [both_hashes(*pair) for pair in zip(first, second, strict=True)]
    if isinstance(first, str) and first.startswith(("=", "text ")):
        return first if first == second else f"{first}|{second.removeprefix('=').removeprefix('text ')}"
    if first != second:
        raise RuntimeError(f"the driver with stand-in texts does something else: {first} instead of {second}")
    return first


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts.release_goldens", description="Record what the released evaluation sends."
    )
    parser.add_argument("--release", type=Path, required=True, metavar="DIR", help="copy of the released repository")
    parser.add_argument("--dst", type=Path, required=True, metavar="FILE", help="the golden to write")
    args = parser.parse_args()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/v1"
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_files(root)
        stub_datasets(root)
        own = {path: (args.release / path).read_text() for path in (DRIVER, LOADERS)}
        stand_in = stand_in_source(args.release)
        runs = [
            record(*load_driver(sources, root / label), root, url)
            for label, sources in ((FIRST_TEXTS, stand_in), (SECOND_TEXTS, own))
        ]
        texts = read_release(root / FIRST_TEXTS)
    head = {"commit": COMMIT, "texts": texts, "videos": VIDEOS, "files": FILES, "subtitles": SUBTITLES}
    head |= {"rows": ROWS, "replies": REPLIES}
    lines = ",\n".join(json.dumps(dialogue) for dialogue in both_hashes(*runs))
    args.dst.write_text(f'{json.dumps(head, indent=1)[:-2]},\n "dialogues": [\n{lines}\n]\n}}\n')
    print(f"{args.dst}: {len(runs[0])} dialogues")


if __name__ == "__main__":
    run_cli(main)
