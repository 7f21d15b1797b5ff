"""Locks a run's directory at gs://BUCKET/PATH for one run at a time, like a file lock on a disk.

An object names the run that holds the lease. The run rewrites the object every RENEW_S, conditional on the generation
of its previous write. Another run waits LEASE_S: if the object changes, its owner is alive; otherwise the owner is
dead, for example after a preemption, and the new run takes over. A run that lost its lease detects this before its next
checkpoint.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from model_port.bucket import Bucket, Conflict
from paravt_jax.run.log import whole_file

OWNER = ".owner.json"
BUCKET_FILE = ".bucket.json"  # file in the local directory with its bucket and token
RENEW_S, LEASE_S, LOOK_S = 20.0, 120.0, 5.0
RELEASE_S = 5.0  # time to release the lease before the process exits


class Lease:
    """A lease on a bucket's directory. Use `with hold_lease(bucket, directory, say) as lease`."""

    def __init__(self, bucket: Bucket, token: str):
        self._bucket, self._object, self._token = bucket, bucket / OWNER, token
        self._generation, self._num_renewals = b"", 0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self.lost = ""  # reason why this run lost the lease; empty while it holds the lease

    def acquire(self, say: Callable[[str], None]) -> None:
        content, generation = self._object.read()
        if content is not None and self._owner(content).get("token") != self._token:
            who = self._owner(content).get("who", "an unknown process")
            say(f"{self._bucket} was last locked by {who}; checking for {LEASE_S:g} s whether it still runs")
            end_s = time.monotonic() + LEASE_S
            while content is not None and time.monotonic() < end_s:
                time.sleep(LOOK_S)
                content, now = self._object.read()
                if content is not None and now != generation:
                    raise self._held_error(content)
                generation = now
        try:
            self._generation = self._object.write(self._content(), generation)
        except Conflict:
            raise self._held_error(self._object.read()[0] or b"{}") from None
        threading.Thread(target=self._renew_loop, daemon=True).start()

    def renew(self) -> None:
        """Renews the lease. Raises if another run has taken over the directory."""
        with self._lock:
            if not self.lost:
                try:
                    self._generation = self._object.write(self._content(), self._generation)
                    self._num_renewals += 1  # only now: `write` recognizes its content if an answer was lost
                except Conflict:
                    who = self._owner(self._object.read()[0] or b"{}").get("who", "another process")
                    self.lost = f"{self._bucket} was taken over by {who}, which trains there now"
            if self.lost:
                raise RuntimeError(self.lost)

    def release(self) -> None:
        self._ended.set()
        with self._lock:
            if not self.lost:
                with suppress(RuntimeError, Conflict):  # another run can still take over as from a dead run
                    self._object.delete(self._generation)

    def release_before_exit(self) -> None:
        """Releases the lease, but waits at most RELEASE_S for the bucket's answer."""
        releasing = threading.Thread(target=self.release, daemon=True)
        releasing.start()
        releasing.join(RELEASE_S)

    def _renew_loop(self) -> None:
        while not self._ended.wait(RENEW_S) and not self.lost:
            with suppress(RuntimeError):  # the next checkpoint also renews, and reports the error
                self.renew()

    def _content(self) -> bytes:
        who = f"process {os.getpid()} on {socket.gethostname()}"
        return json.dumps({"token": self._token, "who": who, "renewals": self._num_renewals}).encode()

    def _owner(self, content: bytes) -> dict[str, str]:
        with suppress(ValueError):
            owner = json.loads(content)
            return owner if isinstance(owner, dict) else {}
        return {}

    def _held_error(self, content: bytes) -> RuntimeError:
        who = self._owner(content).get("who", "another process")
        return RuntimeError(f"{who} uses {self._bucket}; wait for it, or choose another run_dir")


@contextmanager
def hold_lease(bucket: Bucket, directory: Path, say: Callable[[str], None]) -> Iterator[Lease]:
    """Holds a lease on host 0. Lock the local directory first, so that a dead run from it is recognized at once."""
    lease = Lease(bucket, token_of(directory, bucket))
    lease.acquire(say)
    try:
        yield lease
    finally:
        lease.release()


def token_of(directory: Path, bucket: Bucket) -> str:
    """Reads or makes the token in the run's local directory, which must be empty or belong to this bucket."""
    file = directory / BUCKET_FILE
    if not file.exists():
        if entries := [entry.name for entry in directory.iterdir() if not entry.name.startswith(".")]:
            raise ValueError(
                f"{directory} would hold the local files of {bucket}, but has other files, such as {entries[0]}; move "
                f"them away, start in another directory, or choose another run_dir"
            )
        with whole_file(file) as content:
            content.write(json.dumps({"bucket": str(bucket), "token": secrets.token_hex(8)}).encode())
    record = json.loads(file.read_bytes())
    if record["bucket"] != str(bucket):
        raise ValueError(
            f"{directory} has the local files of {record['bucket']}, not of {bucket}; start in another directory, or "
            f"change the last part of run_dir"
        )
    return record["token"]
