"""A pool of decoder processes. Each does one job at a time, with a deadline per job.

A worker that misses a deadline is killed, a worker that dies is replaced, and a worker that has done MAX_JOBS jobs is
retired, because decoders leak memory on some files. At most the current job fails. One thread per worker waits for it.

A worker's memory limit is the same on every machine, so that all machines can read the same videos. The number of
workers is limited so that they use at most half of the machine's memory.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import rollout
from rollout.video.errors import VideoError, VideoTimeout, VideoUnavailable
from rollout.video.wire import Message, receive, send

logger = logging.getLogger(__name__)
WORKER_BYTES = 2 * 2**30  # 10-bit 8K H.265 takes between 1 and 1.5 GiB
MAX_JOBS = 256  # per worker, before it is retired
WORKERS_FRAC = 0.5  # fraction of the memory for all workers together
# The memory limit of a container, in both cgroup versions; without a limit the value is not a number or is huge.
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
KILL_S = 5.0  # the kernel takes time to remove a killed process
SOURCES = str(Path(rollout.__file__).parents[1])


class WorkerPool:
    """Starts workers on demand, kills them when a job misses its deadline, and replaces them when they die."""

    def __init__(self, num_workers: int):
        if num_workers < 1:
            raise ValueError(f"{num_workers=} must be at least 1")
        self.num_workers = workers_within(_memory_bytes(), num_workers)
        if self.num_workers < num_workers:
            logger.warning("%d of %d decoders: there is not enough memory for more", self.num_workers, num_workers)
        self.totals = dict(jobs=0, timeouts=0, worker_deaths=0, workers_retired=0, waited_s=0.0, worked_s=0.0)
        self._lock = threading.Lock()  # guards the totals and everything below
        self._closed = False
        self._idle: list[_Worker] = []
        self._busy: set[_Worker] = set()
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="video")

    def start(self) -> None:
        """Starts all workers in the background, so that the first jobs do not have to wait for them."""
        for _ in range(self.num_workers):
            self._idle.append(_Worker())

    def submit(
        self, job: dict[str, Any], deadline_s: float | int, on_message: Callable[[Message], None]
    ) -> Future[Message]:
        """Queues a job. The future gets its last message; `on_message` gets earlier ones, in the receiving thread.

        The deadline starts when a worker takes the job. All jobs have deadlines, so none waits forever.
        """
        with self._lock:
            self._raise_if_closed()
            return self._threads.submit(self._run, job, deadline_s, on_message, time.monotonic())

    def close(self) -> None:
        """Kills all workers; waiting and running jobs fail."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for worker in self._busy:
                worker.process.kill()  # its thread then cleans up
        for worker in idle:
            worker.end()
        self._threads.shutdown()

    def _run(
        self, job: dict[str, Any], deadline_s: float | int, on_message: Callable[[Message], None], submitted_at: float
    ) -> Message:
        started_at = time.monotonic()
        self._add(jobs=1, waited_s=started_at - submitted_at)
        try:
            worker = self._acquire()
        except OSError as problem:
            raise VideoUnavailable(f"the video cannot be decoded: no decoder can start: {problem.strerror}") from None
        try:
            return worker.ask(job, started_at + deadline_s, on_message)
        except VideoTimeout:
            self._add(timeouts=1)
            raise
        except EOFError:
            self._raise_if_closed()
            self._add(worker_deaths=1)
            if not worker.is_up:
                raise VideoUnavailable("the video cannot be decoded: no decoder can start") from None
            if worker.was_killed:  # by the kernel, because memory ran out, or by a user
                raise VideoUnavailable("the video cannot be decoded: its decoder was killed") from None
            raise VideoError("the video cannot be decoded: the decoder crashed on it") from None
        finally:
            self._put_back(worker)
            self._add(worked_s=time.monotonic() - started_at)

    def _acquire(self) -> "_Worker":
        """Returns a living idle worker, or a new one. There are never more workers than threads."""
        with self._lock:
            self._raise_if_closed()
            while self._idle:
                worker = self._idle.pop(0)
                if worker.process.poll() is None:
                    break
                worker.end()
            else:
                worker = _Worker()
            self._busy.add(worker)
            return worker

    def _put_back(self, worker: "_Worker") -> None:
        retired = worker.reusable and worker.num_jobs >= MAX_JOBS
        with self._lock:
            self._busy.remove(worker)
            self.totals["workers_retired"] += retired
            if worker.reusable and not retired and not self._closed:
                self._idle.append(worker)
                return
        worker.end()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise VideoUnavailable("the video cannot be read: the reader was closed")

    def _add(self, **amounts: float | int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self.totals[name] += amount


def workers_within(memory_bytes: int, num_workers: int) -> int:
    """Returns how many workers may run in this much memory, at least one."""
    return max(1, min(num_workers, int(memory_bytes * WORKERS_FRAC) // WORKER_BYTES))


def _memory_bytes() -> int:
    """Returns the memory of the machine, or of the container if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [path.read_text().strip() for path in CONTAINER_LIMITS if path.is_file()]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


class _Worker:
    """A decoder process that does one job at a time, connected by a socket."""

    def __init__(self) -> None:
        paths = [SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
        single_threaded = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        self.num_jobs = 0
        self.is_up = False  # True once the worker has reported that its decoder is loaded
        self.reusable = True  # False during a job, and after the worker ran out of memory
        self.link, its_end = socket.socketpair()
        arguments = its_end.fileno(), WORKER_BYTES, os.getpid()
        with its_end:
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "rollout.video.worker", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env={**os.environ, **single_threaded, "PYTHONPATH": os.pathsep.join(paths)},
                    pass_fds=[its_end.fileno()],
                    start_new_session=True,  # Ctrl-C only reaches the parent, and the worker ends with its parent
                )
            except OSError:
                self.link.close()
                raise
        self.messages = self.link.makefile("rb")

    def ask(self, job: dict[str, Any], deadline_at: float, on_message: Callable[[Message], None]) -> Message:
        """Runs a job and returns its last message.

        Raises EOFError if the process dies, and VideoError if the video is at fault.
        """
        self.num_jobs += 1
        self.reusable = False
        try:
            self._bound_wait(deadline_at)
            send(self.link, job)
            if not self.is_up:
                receive(self.messages)
                self.is_up = True
            while not (received := self._receive(deadline_at))[0].get("last"):
                on_message(received)
        except TimeoutError:
            raise VideoTimeout("the video could not be read in time") from None
        except ConnectionError:
            raise EOFError("the worker is gone") from None
        self.reusable = not received[0].get("spent")
        if "error" in received[0]:
            raise VideoError(received[0]["error"])
        return received

    def _receive(self, deadline_at: float) -> Message:
        self._bound_wait(deadline_at)
        return receive(self.messages)

    def _bound_wait(self, deadline_at: float) -> None:
        if (left_s := deadline_at - time.monotonic()) <= 0:
            raise TimeoutError
        self.link.settimeout(left_s)

    @property
    def was_killed(self) -> bool:
        """Whether the process was ended by SIGKILL, which no crash causes."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(KILL_S) == -signal.SIGKILL
        return False

    def end(self) -> None:
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process stuck in the kernel on a dead disk cannot be killed
            self.process.wait(KILL_S)
        self.messages.close()
        self.link.close()
