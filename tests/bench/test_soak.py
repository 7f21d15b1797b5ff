"""A soak fails where something grows or stays behind: each bound can."""

import pytest

from scripts.bench import soak
from scripts.bench.soak import grown

QUIET = "trap 'exit 143' TERM; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("of", "begin", "allowed", "grew"),
    [
        ("memory, MiB, trainer", 1000, 1180, 1190),
        ("open files, servers", 300, 308, 309),
        ("threads, decoders", 3, 11, 12),
        ("seconds of a step", 5, 50, None),  # says how busy the machine is
    ],
)
def test_what_grows_beyond_its_bound_is_a_violation(of, begin, allowed, grew):
    assert grown([{"of": of, "begin": begin, "end": allowed}]) == []
    if grew is not None:
        assert grown([{"of": of, "begin": begin, "end": grew}]) == [f"{of} grew from {begin} to {grew}"]


def soaked(script, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE_EVERY_S", 0.1)
    monkeypatch.setattr(soak, "GONE_S", 0.5)
    samples, violations = soak.soak(["sh", "-c", script], tmp_path, 0.5, lambda: 1)
    assert samples and samples[0]["trainer"]["files"] > 0
    return violations


def test_a_command_that_leaves_nothing_passes(tmp_path, monkeypatch):
    assert soaked(QUIET, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("script", "found"),
    [
        (f"touch here; {QUIET}", "left outside of its directory: here"),
        (f"touch $TMPDIR/there; {QUIET}", "left outside of its directory: tmp/there"),
        (f"sleep 3 & {QUIET}", "are still there 0.5 s after it ended"),
        ("trap 'exit 7' TERM; while :; do sleep 0.05; done", "sh ended with exit code 7"),
    ],
    ids=["a file where it works", "a temporary file", "a process", "another exit code"],
)
def test_what_a_command_leaves_is_a_violation(script, found, tmp_path, monkeypatch):
    (violation,) = soaked(script, tmp_path, monkeypatch)
    assert found in violation


def test_a_command_that_ends_by_itself_fails_the_soak(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="sh ended with 3"):
        soaked("exit 3", tmp_path, monkeypatch)
