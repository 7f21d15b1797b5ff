"""Stored frames stay within their bounds with LRU eviction, and damaged files are never returned."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from rollout.picture import Picture
from rollout.video.box import Box
from rollout.video.store import ABANDONED_S, MEMORY_PER_PIXEL_BYTE, DiskStore, FileStore, FrameKey, MemoryStore

HEIGHT, WIDTH = 5, 7
PIXEL_BYTES = HEIGHT * WIDTH * 3
MEMORY_BYTES = PIXEL_BYTES * MEMORY_PER_PIXEL_BYTE
ROOM_FOR_3 = 3 * (PIXEL_BYTES + 32)


def key(frame: int) -> FrameKey:
    return FrameKey("abcdef", frame, HEIGHT, WIDTH)


def picture(seed: int) -> Picture:
    return Picture.of(np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8))


def files(directory) -> list:
    return sorted(path for path in directory.rglob("*") if path.is_file())


def kept(store, frames: int = 10) -> list[int]:
    return [frame for frame in range(frames) if store.get(key(frame)) is not None]


def test_memory_evicts_the_least_recently_used_frames():
    store = MemoryStore(round(3.5 * MEMORY_BYTES))
    for frame in range(3):
        store.put(key(frame), picture(frame))
    assert store.get(key(0)) is not None
    store.put(key(3), picture(3))
    assert kept(store) == [0, 2, 3] and store.num_bytes <= store.max_bytes


def test_memory_counts_a_picture_once_and_skips_too_large_ones():
    store = MemoryStore(round(1.5 * MEMORY_BYTES))
    for _ in range(3):
        store.put(key(0), picture(0))
    assert kept(store) == [0]
    store = MemoryStore(PIXEL_BYTES)
    store.put(key(0), picture(0))
    assert kept(store) == [] and store.num_bytes == 0


def test_memory_accounts_for_incompressible_pictures():
    noise = Picture.of(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
    assert noise.pixels.nbytes + len(noise.png_base64) <= noise.pixels.nbytes * MEMORY_PER_PIXEL_BYTE * 1.01


def test_a_picture_on_disk_is_unchanged_in_a_later_run(tmp_path):
    DiskStore(tmp_path, ROOM_FOR_3).put(key(1), picture(1))
    later = DiskStore(tmp_path, ROOM_FOR_3)
    assert later.get(replace(key(1), box=Box(0.0, 0.0, 0.5, 1.0))) is None  # not even at the same size
    found = later.get(key(1))
    assert found is not None and found.key == picture(1).key
    np.testing.assert_array_equal(found.pixels, picture(1).pixels)


def test_disk_evicts_the_least_recently_used_frames_also_in_a_later_run(tmp_path):
    store = DiskStore(tmp_path, ROOM_FOR_3)
    for frame in range(3):
        store.put(key(frame), picture(frame))
        os.utime(files(tmp_path)[frame], (frame, frame))
    assert store.get(key(0)) is not None  # the oldest frame, just used
    later = DiskStore(tmp_path, ROOM_FOR_3)
    later.put(key(3), picture(3))
    assert kept(later) == [0, 2, 3] and later.num_bytes == ROOM_FOR_3 and len(files(tmp_path)) == 3
    assert DiskStore(tmp_path, ROOM_FOR_3 // 3).num_bytes == ROOM_FOR_3 // 3 and len(files(tmp_path)) == 1


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content[:50] + bytes([content[50] ^ 1]) + content[51:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
        lambda content: content + b"x",
    ],
    ids=["cut off", "empty", "a wrong pixel", "a wrong key", "too long"],
)
def test_a_damaged_file_is_counted_and_removed(tmp_path, spoil):
    store = DiskStore(tmp_path, ROOM_FOR_3)
    store.put(key(0), picture(0))
    (path,) = files(tmp_path)
    path.write_bytes(spoil(path.read_bytes()))
    assert store.get(key(0)) is None
    assert store.totals["damaged"] == 1 and store.num_bytes == 0 and not path.exists()
    store.put(key(0), picture(0))
    assert kept(store) == [0]


def test_a_file_removed_by_another_process_is_a_miss(tmp_path):
    store = DiskStore(tmp_path, ROOM_FOR_3)
    store.put(key(0), picture(0))
    files(tmp_path)[0].unlink()
    assert store.get(key(0)) is None and store.totals["damaged"] == 0 and store.num_bytes == 0


def test_files_of_a_killed_writer_are_removed_later(tmp_path):
    store = DiskStore(tmp_path, ROOM_FOR_3)
    store.put(key(0), picture(0))
    old, fresh = (files(tmp_path)[0].with_name(f"{name}.partial") for name in ("old", "fresh"))
    for path in (old, fresh):
        path.write_bytes(b"half")
    os.utime(old, (0, time.time() - ABANDONED_S - 60))
    DiskStore(tmp_path, ROOM_FOR_3)
    assert not old.exists() and fresh.exists()


def test_an_unwritable_disk_is_counted_and_reported_once(tmp_path, caplog):
    store = DiskStore(tmp_path, ROOM_FOR_3)
    (tmp_path / "ab").write_text("in the way")
    for frame in range(2):
        store.put(key(frame), picture(frame))
    assert store.totals["failed_writes"] == 2 and len(caplog.records) == 1
    assert "frames cannot be kept in" in caplog.text


def test_concurrent_writers_never_leave_a_partial_file(tmp_path):
    """Each writer has its own store, like separate processes and hosts."""
    halves: list[bytes] = []

    def whole(content: bytes) -> bytes | None:
        if len(set(content)) > 1 or len(content) % 10_000:
            halves.append(content)
        return content

    def work(number: int) -> None:
        store = FileStore(tmp_path, 2**30, ".part")
        for turn in range(30):
            store.write("ab-entry.part", bytes([number]) * 10_000 * (1 + (number + turn) % 5))
            store.read("ab-entry.part", whole)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert halves == [] and [path.name for path in files(tmp_path)] == ["ab-entry.part"]
