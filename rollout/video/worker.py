"""A worker process: `python -m rollout.video.worker FD`. Takes one job at a time from a socket, and answers on it.

It is a program of its own, not a child of multiprocessing, which would import the trainer's main module, and with it
jax, into every worker. It ends with its parent, however that ends, even in the middle of decoding.
"""

import os
import select
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from rollout.video.decode import decode, probe
from rollout.video.errors import VideoError
from rollout.video.wire import receive, send

PARENT_CHECK_MS = 2000  # the link tells at once; this is for a parent whose end of it lives on in another child


def main() -> None:
    link = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(link, os.getppid()), daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent is gone
        send(link, {"up": True})
        while True:
            job, _ = receive(link)
            try:
                answer, raw = _do(link, job)
            except VideoError as problem:
                answer, raw = {"error": str(problem)}, b""
            send(link, {**answer, "last": True}, raw)


def _do(link: socket.socket, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    if job["do"] == "probe":
        return probe(job["path"])

    def emit(tick: int, pixels: np.ndarray) -> None:
        send(link, {"tick": tick}, pixels.tobytes())

    decode(job["path"], job["identity"], job["groups"], job["size_px"], emit)
    return {}, b""


def _end_with_parent(link: socket.socket, parent: int) -> None:
    """The decoder lets go of the interpreter's lock while it works or hangs, so this thread always gets to run."""
    hang_up = select.poll()
    hang_up.register(link, 0)  # that the other end is closed is reported unasked
    while os.getppid() == parent and not hang_up.poll(PARENT_CHECK_MS):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
