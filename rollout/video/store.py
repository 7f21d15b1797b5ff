"""Decoded frames, in memory and on disk, both bounded in bytes; what was not used for longest goes first.

A frame on disk is its picture's key, which is a hash of the pixels, and the pixels. Files appear whole by a rename. One
that does not match its own key is removed and counts as missing. Several processes may share a directory: each keeps
what it knows of within the bound, and a file that another one removed is a miss.
"""

import logging
import math
import os
import threading
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollout.picture import Picture
from rollout.video.box import Box

logger = logging.getLogger(__name__)
KEY_BYTES = len(Picture.of(np.zeros((1, 1, 3), np.uint8)).key)
SUFFIX = ".frame"
PARTIAL_SUFFIX = ".partial"
ABANDONED_S = 600.0  # after which a file that is not whole has no writer any more
# A picture keeps its PNG in base64 once that was asked for: at worst, of noise, four thirds of its pixels.
MEMORY_PER_PIXEL_BYTE = 1 + 4 / 3


@dataclass(frozen=True)
class FrameKey:
    identity: str  # of the video
    frame: int
    height: int
    width: int
    box: Box | None = None  # the part of the frame that is shown


class MemoryStore:
    def __init__(self, max_bytes: int):
        self.max_bytes, self.num_bytes = max_bytes, 0
        self._pictures: OrderedDict[FrameKey, Picture] = OrderedDict()

    def get(self, key: FrameKey) -> Picture | None:
        if picture := self._pictures.get(key):
            self._pictures.move_to_end(key)
        return picture

    def put(self, key: FrameKey, picture: Picture) -> None:
        self._forget(key)
        self._pictures[key] = picture
        self.num_bytes += _memory_bytes(picture)
        while self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._pictures)))

    def _forget(self, key: FrameKey) -> None:
        if picture := self._pictures.pop(key, None):
            self.num_bytes -= _memory_bytes(picture)


class DiskStore:
    """May be used from several threads at once."""

    def __init__(self, directory: str | Path, max_bytes: int):
        self.directory, self.max_bytes, self.num_bytes = Path(directory), max_bytes, 0
        self.totals = dict(damaged=0, failed_writes=0)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_stock()

    def get(self, key: FrameKey) -> Picture | None:
        name = _name(key)
        path = self._path(name)
        try:
            picture = _unpacked(path.read_bytes(), key)
        except FileNotFoundError:
            self._note(name, 0)
            return None
        except OSError:
            picture = None
        if picture is None:
            self._count("damaged")
            self._note(name, 0)
            path.unlink(missing_ok=True)
            return None
        with suppress(FileNotFoundError):  # removed by another process since
            os.utime(path)  # a later run learns from it what was used last
        self._note(name, KEY_BYTES + picture.num_bytes)
        return picture

    def put(self, key: FrameKey, picture: Picture) -> None:
        """A frame that cannot be written is only not there the next time; it is counted, and the first is logged."""
        name = _name(key)
        path = self._path(name)
        content = picture.key.encode() + picture.pixels.tobytes()
        partial = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}{PARTIAL_SUFFIX}")
        try:
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as problem:
            if self._count("failed_writes") == 1:
                logger.warning("frames cannot be kept in %s: %s", self.directory, problem.strerror)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        self._note(name, len(content))

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _take_stock(self) -> None:
        """Learns what earlier runs left, the last used last, and clears away what they did not finish."""
        entries = []
        for path in self.directory.glob("??/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    entries.append((status.st_mtime, path.name, status.st_size))
                elif path.suffix == PARTIAL_SUFFIX and time.time() - status.st_mtime > ABANDONED_S:
                    path.unlink()
        for _, name, num_bytes in sorted(entries):
            self._note(name, num_bytes)

    def _note(self, name: str, num_bytes: int) -> None:
        """Notes that a file was just used, or with 0 bytes that it is gone, and removes those that are too many."""
        too_many = []
        with self._lock:
            self.num_bytes += num_bytes - self._sizes.pop(name, 0)
            if num_bytes:
                self._sizes[name] = num_bytes
            while self.num_bytes > self.max_bytes:
                old, old_bytes = self._sizes.popitem(last=False)
                self.num_bytes -= old_bytes
                too_many.append(old)
        for old in too_many:
            self._path(old).unlink(missing_ok=True)

    def _count(self, name: str) -> int:
        with self._lock:
            self.totals[name] += 1
            return self.totals[name]


def _memory_bytes(picture: Picture) -> int:
    return round(picture.num_bytes * MEMORY_PER_PIXEL_BYTE)


def _name(key: FrameKey) -> str:
    part = "" if key.box is None else "-" + "_".join(map(str, key.box))
    return f"{key.identity}-{key.frame}-{key.height}x{key.width}{part}{SUFFIX}"


def _unpacked(content: bytes, key: FrameKey) -> Picture | None:
    shape = key.height, key.width, 3
    if len(content) != KEY_BYTES + math.prod(shape):
        return None
    picture = Picture.of(np.frombuffer(content, np.uint8, offset=KEY_BYTES).reshape(shape))
    return picture if picture.key.encode() == content[:KEY_BYTES] else None
