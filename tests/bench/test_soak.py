"""A soak test fails if a resource grows beyond its bound or something is left behind."""

from argparse import ArgumentParser

import pytest

from scripts.bench import chaos, soak
from scripts.bench.soak import grown

QUIET = "trap 'exit 143' TERM; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("of", "begin", "allowed", "grew"),
    [
        ("memory, MiB, trainer", 1000, 1180, 1190),
        ("open files, servers", 300, 308, 309),
        ("threads, decoders", 3, 11, 12),
        ("seconds of a step", 5, 50, None),  # step time depends on other load
    ],
)
def test_growth_beyond_a_bound_is_a_violation(of, begin, allowed, grew):
    assert grown([{"of": of, "begin": begin, "end": allowed}]) == []
    if grew is not None:
        assert grown([{"of": of, "begin": begin, "end": grew}]) == [f"{of} grew from {begin} to {grew}"]


def violations_of(script, tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "SAMPLE_EVERY_S", 0.1)
    monkeypatch.setattr(soak, "GONE_S", 0.5)
    (tmp_path / "shm").mkdir()  # servers killed by other tests leave segments in the real directory
    for module in (soak, chaos):
        monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "shm")
    samples, violations = soak.soak(["sh", "-c", script], tmp_path, 0.5, lambda: 1)
    assert samples and samples[0]["trainer"]["files"] > 0
    return violations


def test_a_command_without_leftovers_passes(tmp_path, monkeypatch):
    assert violations_of(QUIET, tmp_path, monkeypatch) == []


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (f"touch stray; {QUIET}", "left outside of its directory: stray"),
        (f"touch $TMPDIR/stray; {QUIET}", "left outside of its directory: tmp/stray"),
        (f"sleep 3 & {QUIET}", "still run 0.5 s after it ended"),
        ("trap 'exit 7' TERM; while :; do sleep 0.05; done", "sh ended with exit code 7"),
    ],
    ids=["a file", "a temporary file", "a process", "an exit code"],
)
def test_anything_that_a_command_leaves_is_a_violation(script, message, tmp_path, monkeypatch):
    (violation,) = violations_of(script, tmp_path, monkeypatch)
    assert message in violation


def arguments(out, *more):
    parser = ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(["--out", str(out), *more])


@pytest.mark.parametrize("left", ["run", "outside"])
def test_a_directory_of_an_earlier_soak_is_refused(left, tmp_path):
    (tmp_path / left).mkdir()
    with pytest.raises(ValueError, match=rf"{tmp_path} has an earlier soak; move it away"):
        soak.run(arguments(tmp_path))


def test_a_soak_without_a_step_names_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(soak, "_training", lambda *_: ([], []))
    with pytest.raises(RuntimeError, match=r"no step in 0.1 minutes, .*soak.log"):
        soak.run(arguments(tmp_path, "--minutes", "0.1"))


def test_a_service_with_a_single_answer_has_no_seconds_each(tmp_path, monkeypatch):
    samples = [{"seconds": 1.0, "steps": 1, "trainer": dict(memory_mib=5.0, files=3, threads=2, cpu_s=1.0)}]
    monkeypatch.setattr(soak, "_serving", lambda *_: (samples, []))
    result = soak.run(arguments(tmp_path, "--serve"))
    assert result["steps"] == 1 and (tmp_path / "soak.png").is_file()


def test_a_command_that_exits_early_fails_the_soak(tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="sh ended with 3"):
        violations_of("exit 3", tmp_path, monkeypatch)
