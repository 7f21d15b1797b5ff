"""Stores decoded frames in memory and on disk, both bounded in bytes, with LRU eviction.

A frame's file has the picture's key, which is a hash of the pixels, followed by the pixels. Files are written
atomically. A file that does not match its key is removed and counts as missing. Several processes and hosts may share a
directory: each limits the total size of the files it has seen, and a file that another process removed is a miss.
"""

import logging
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollout.picture import Picture
from rollout.video.box import Box

logger = logging.getLogger(__name__)
Content = TypeVar("Content")
KEY_BYTES = len(Picture.of(np.zeros((1, 1, 3), np.uint8)).key)
SUFFIX = ".frame"
PARTIAL_SUFFIX = ".partial"
ABANDONED_S = 600.0  # older partial files no longer have a writer
# A picture that was sent caches its PNG in base64. In the worst case, noise, this takes 4/3 of the pixels' bytes.
MEMORY_PER_PIXEL_BYTE = 1 + 4 / 3


@dataclass(frozen=True)
class FrameKey:
    identity: str  # of the video
    frame: int
    height: int
    width: int
    box: Box | None = None  # the part of the frame; None: all of it


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


class FileStore:
    """Named files with a bound on their total size. Thread-safe."""

    def __init__(self, directory: str | Path, max_bytes: int, suffix: str):
        self.directory, self.max_bytes, self.num_bytes, self._suffix = Path(directory), max_bytes, 0, suffix
        self.totals = dict(damaged=0, failed_writes=0)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()
        self.directory.mkdir(parents=True, exist_ok=True)
        self._scan()

    def read(self, name: str, unpack: Callable[[bytes], Content | None]) -> Content | None:
        """Returns `unpack` of a file's content, or None if there is no file. Removes a file that unpacks to None."""
        path = self._path(name)
        try:
            packed = path.read_bytes()
            content = unpack(packed)
        except FileNotFoundError:
            self._note(name, 0)
            return None
        except OSError:
            packed, content = b"", None
        if content is None:
            self._count("damaged")
            self._note(name, 0)
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with suppress(OSError):  # another process has removed the file, or it is another user's
            os.utime(path)  # later runs order files by their last use
        self._note(name, len(packed))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Writes a file. A failed write only costs a later miss; failures are counted, and the first is logged."""
        path = self._path(name)
        partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}")
        try:
            path.parent.mkdir(exist_ok=True)
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as problem:
            if self._count("failed_writes") == 1:
                logger.warning("%ss cannot be kept in %s: %s", self._suffix[1:], self.directory, problem.strerror)
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            return
        self._note(name, len(content))

    def _path(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _scan(self) -> None:
        """Registers the files of earlier runs in the order of their last use, and deletes abandoned partial files."""
        entries = []
        for path in self.directory.glob("??/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.suffix == self._suffix:
                    entries.append((status.st_mtime, path.name, status.st_size))
                elif path.suffix == PARTIAL_SUFFIX and time.time() - status.st_mtime > ABANDONED_S:
                    path.unlink()
        for _, name, num_bytes in sorted(entries):
            self._note(name, num_bytes)

    def _note(self, name: str, num_bytes: int) -> None:
        """Records the use of a file, or its removal if `num_bytes` is 0, and evicts the oldest files over the bound."""
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
            with suppress(OSError):
                self._path(old).unlink(missing_ok=True)

    def _count(self, name: str) -> int:
        with self._lock:
            self.totals[name] += 1
            return self.totals[name]


class DiskStore(FileStore):
    def __init__(self, directory: str | Path, max_bytes: int):
        super().__init__(directory, max_bytes, SUFFIX)

    def get(self, key: FrameKey) -> Picture | None:
        return self.read(_name(key), lambda content: _unpacked(content, key))

    def put(self, key: FrameKey, picture: Picture) -> None:
        self.write(_name(key), picture.key.encode() + picture.pixels.tobytes())


def _memory_bytes(picture: Picture) -> int:
    return round(picture.pixels.nbytes * MEMORY_PER_PIXEL_BYTE)


def _name(key: FrameKey) -> str:
    part = "" if key.box is None else "-" + "_".join(map(str, key.box))
    return f"{key.identity}-{key.frame}-{key.height}x{key.width}{part}{SUFFIX}"


def _unpacked(content: bytes, key: FrameKey) -> Picture | None:
    shape = key.height, key.width, 3
    if len(content) != KEY_BYTES + math.prod(shape):
        return None
    picture = Picture.of(np.frombuffer(content, np.uint8, offset=KEY_BYTES).reshape(shape))
    return picture if picture.key.encode() == content[:KEY_BYTES] else None
