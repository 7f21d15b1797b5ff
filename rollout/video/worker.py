"""A decoder process that does one job at a time: `python -m rollout.video.worker FD MAX_BYTES PARENT`.

Jobs arrive over a socket. The process does not use multiprocessing, which would import the trainer's main module, and
with it jax, into every worker. It ends when its parent ends for any reason, even while it decodes.
"""

import os
import resource
import select
import socket
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np

from rollout.video.box import Box
from rollout.video.decode import decode, probe
from rollout.video.errors import VideoError
from rollout.video.wire import receive, send

PARENT_CHECK_MS = 2000  # another child of a dead parent may keep the link open, so the parent is also polled


def main() -> None:
    _limit_memory(int(sys.argv[2]))
    link = socket.socket(fileno=int(sys.argv[1]))
    jobs = link.makefile("rb")
    threading.Thread(target=_end_with_parent, args=(link, int(sys.argv[3])), daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent has ended
        send(link, {"up": True})
        while True:
            job, _ = receive(jobs)
            try:
                answer, raw = _do(link, job)
            except VideoError as problem:
                answer, raw = {"error": str(problem)}, b""
            except MemoryError:  # it is uncertain what was freed, so the parent ends this process
                answer, raw = {"error": "the video cannot be decoded: it takes too much memory", "spent": True}, b""
            send(link, {**answer, "last": True}, raw)


def _do(link: socket.socket, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    if job["do"] == "probe":
        return probe(job["path"])

    def emit(tick: int, pixels: np.ndarray) -> None:
        send(link, {"tick": tick}, pixels.tobytes())

    box = Box(*job["box"]) if job.get("box") else None
    decode(job["path"], job["identity"], job["groups"], job["size_px"], emit, box)
    return {}, b""


def _limit_memory(max_bytes: int) -> None:
    """Limits writable data, not address space, because threads and libraries reserve more space than they use."""
    _, allowed_bytes = resource.getrlimit(resource.RLIMIT_DATA)
    if allowed_bytes == resource.RLIM_INFINITY or max_bytes < allowed_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (max_bytes, max_bytes))


def _end_with_parent(link: socket.socket, parent: int) -> None:
    """Ends this process with its parent, also during decoding, because the decoder releases the interpreter lock."""
    hang_up = select.poll()
    hang_up.register(link, 0)  # POLLHUP is always reported
    while os.getppid() == parent and not hang_up.poll(PARENT_CHECK_MS):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
