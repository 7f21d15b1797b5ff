"""Sends buckets of weights to SGLang servers: a small torch process in the servers' environment.

`rollout.engine.publishing` starts it as a script, because the servers' environment lacks the rest of this package. It
reads one JSON command per line: a file of raw tensors, their layout, and the servers to send to. It answers each with
one line, {"problems": {url: problem}}. On a GPU the servers map the bucket's memory, so they must run on this host.
"""

import base64
import ctypes
import json
import mmap
import pickle
import signal
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
from sglang.srt.weight_sync.tensor_bucket import (  # pyright: ignore[reportMissingImports]
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
)

PR_SET_PDEATHSIG = 1


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # must not outlive the learner
    _answer({"problems": {}})  # ready
    for line in sys.stdin:
        _answer({"problems": _send(json.loads(line))})


def _answer(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def _send(command: dict[str, Any]) -> dict[str, str]:
    with Path(command["file"]).open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        raw = torch.frombuffer(mapped, dtype=torch.uint8)
        flat = raw.cuda() if torch.cuda.is_available() else raw.clone()
        del raw
    bucket = FlattenedTensorBucket(flattened_tensor=flat, metadata=[_metadata(each) for each in command["tensors"]])
    payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    # SGLang's serializer shares GPU memory. Given CPU tensors, it crashes the server that reads them.
    raw_bytes = MultiprocessingSerializer.serialize(payload) if flat.is_cuda else pickle.dumps(payload)
    encoded = base64.b64encode(raw_bytes).decode()
    with ThreadPoolExecutor(len(command["urls"])) as pool:
        sent = {url: pool.submit(_post, url, encoded, command["deadline_s"]) for url in command["urls"]}
    return {url: problem for url, future in sent.items() if (problem := future.result())}


def _metadata(tensor: dict[str, Any]) -> FlattenedTensorMetadata:
    shape, dtype = torch.Size(tensor["shape"]), getattr(torch, tensor["dtype"])
    return FlattenedTensorMetadata(
        tensor["name"], shape, dtype, tensor["start"], tensor["end"], tensor["end"] - tensor["start"]
    )


def _post(url: str, encoded: str, deadline_s: float) -> str:
    """The problem, or ""."""
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=deadline_s) as response:
            num_ranks = json.load(response).get("tp_size", 1)
        body = {
            "serialized_named_tensors": [encoded] * num_ranks,
            "load_format": "flattened_bucket",
            "flush_cache": False,
        }
        request = urllib.request.Request(
            f"{url}/update_weights_from_tensor", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=deadline_s) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as problem:
        return f"{url} answered {problem.code}: {problem.read()[:300].decode(errors='replace')}"
    except (OSError, ValueError) as problem:
        return f"{url}: {problem}"
    return "" if answer.get("success") else f"{url}: {answer.get('message')}"


if __name__ == "__main__":
    main()
