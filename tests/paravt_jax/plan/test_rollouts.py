"""What a plan says of rollouts: the split that loses least, measured services in place of a table, and imitation."""

import json
import re
from dataclasses import asdict, replace

import pytest

from model_port.config import preset
from model_port.tiny import tiny_config
from paravt_jax import sft, train
from paravt_jax.config import EngineConfig, SftConfig, load_config
from paravt_jax.plan.imitation import make_imitation_plan
from paravt_jax.plan.plan import DEVICES, make_plan
from paravt_jax.plan.rollouts import make_rollout_plan, server_devices, typical_groups
from paravt_jax.plan.service import ServiceTimes, load_service
from paravt_jax.plan.tables import imitation_plan_of, plan_of
from paravt_jax.plan.workload import workload_of
from rollout.output_file import OutputFile

H100 = DEVICES["h100"]
MEASURED = ServiceTimes(0.02, 1e-4, 0.005, 0.01, 0.015, 0.001, 1e-6, share=0.5)
# Of the 8B recipe, on eight devices and eight servers.
LEARNER = ("model.path=8b", "mesh.fsdp=8", "mesh.tensor=1", "pack.num_rows=8")
SPLIT = (*LEARNER, "engine.kind=sglang", "engine.urls=[]", "engine.num_servers=8")


def said(capsys, command, monkeypatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["command", *arguments])
    command.main()
    return capsys.readouterr().out


@pytest.fixture
def service_file(tmp_path):
    path = tmp_path / "service.json"
    path.write_text(json.dumps({"bench": "rollout", "service": asdict(MEASURED)}))
    return path


@pytest.fixture(scope="module")
def split_plan():
    config = load_config(None, *SPLIT)
    return make_rollout_plan(config, preset("8b"), make_plan(config, preset("8b"), device=H100))


def test_the_best_split_is_the_one_with_the_shortest_step(split_plan):
    assert split_plan.now in split_plan.splits and len(split_plan.splits) > 1
    assert {split.num_devices for split in split_plan.splits} == {16}
    assert split_plan.best.times.step_s == min(split.times.step_s for split in split_plan.splits)
    for split in split_plan.splits:
        assert 0 <= split.learner_idle_frac < 1 and 0 <= split.idle_frac < 1


def test_only_learners_that_fit_are_compared(split_plan):
    """Masters and moments of 8B alone are 92 GiB."""
    assert min(split.mesh.num_devices for split in split_plan.splits) > 1


def test_another_mesh_of_the_learners_own_devices_is_found():
    """Where it is the quicker one; the config's own is there anyway."""

    def meshes(*settings: str) -> list[tuple[int, int, int]]:
        config = load_config(None, *SPLIT, *settings, "engine.num_servers=1")
        rollouts = make_rollout_plan(config, preset("8b"), make_plan(config, preset("8b"), device=H100))
        assert rollouts is not None and rollouts.now.mesh == config.mesh
        return [(one.mesh.data, one.mesh.fsdp, one.mesh.tensor) for one in rollouts.splits if one.num_servers == 1]

    assert meshes("mesh.fsdp=2", "mesh.tensor=4", "pack.num_rows=2") == [(1, 2, 4), (1, 8, 1)]
    assert meshes() == [(1, 8, 1)]


def test_a_plan_simulates_the_step_and_names_the_split(capsys, monkeypatch):
    out = said(capsys, train, monkeypatch, "--plan", "--config", "configs/paragrpo_8b.yaml", *SPLIT)
    assert "a step of the run, simulated with the table of h100, seconds" in out
    assert "learner + servers  rollout  update  publish  step  idle" in out
    assert "1 x 8 x 1 + 8" in out and "config" in out and "bound by " in out
    assert "lengths that vary by 50%" in out and "new weights go to servers at 2 GB/s" in out
    assert "not estimated" not in out


def test_a_plan_takes_what_was_measured(service_file):
    config = load_config("configs/smoke_cpu.yaml", "engine.kind=sglang", "engine.num_servers=2")
    measured, twice = plan_of(config, "cpu", service=service_file), service_file.with_name("twice.json")
    assert "simulated with measured service times" in measured
    assert "at least: the seconds of the update are not known" in measured
    slower = {name: 2 * value for name, value in asdict(MEASURED).items() if name.endswith("_s")}
    twice.write_text(json.dumps({"service": asdict(replace(MEASURED, **slower))}))
    assert plan_of(config, "cpu", service=twice) != measured
    assert "not simulated: no service times are known" in plan_of(config, "cpu")


def test_the_embedded_engine_has_nothing_to_split():
    config = load_config(None, *LEARNER, "engine.kind=jax")
    plan = make_plan(config, preset("8b"), device=H100)
    rollouts = make_rollout_plan(config, preset("8b"), plan)
    assert rollouts is not None and not rollouts.splits and rollouts.best is rollouts.now
    assert rollouts.service.share == 1 and not rollouts.service.prefixes
    ahead = load_config(None, *LEARNER, "engine.kind=jax", "train.max_staleness=1")
    beside = make_rollout_plan(ahead, preset("8b"), plan)
    assert beside is not None and beside.now.times.step_s == pytest.approx(rollouts.now.times.step_s, rel=0.15)


def test_a_service_of_another_engine_is_refused():
    config = load_config("configs/smoke_cpu.yaml")
    plan = make_plan(config, tiny_config(), device=DEVICES["cpu"])
    with pytest.raises(ValueError, match=r"the service is one of SGLang servers, and engine\.kind=jax"):
        make_rollout_plan(config, tiny_config(), plan, MEASURED)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no JSON"),
        ("[]", "has no 'service'; python -m paravt_jax.bench rollout --json"),
        ('{"service": {"request_s": 1}}', r"without service\.token_s, service\.shown_s"),
        (json.dumps({"service": asdict(MEASURED) | {"token_s": -1}}), r"service\.token_s=-1 must be a number, 0 or"),
        (json.dumps({"service": asdict(MEASURED) | {"token_s": "1"}}), r"service\.token_s='1' must be a number"),
        (json.dumps({"service": asdict(MEASURED) | {"tokens": 1}}), r"service\.tokens is not known"),
        (json.dumps({"service": asdict(MEASURED) | {"max_running": 0}}), r"service\.max_running=0 must be at least 1"),
        (json.dumps({"service": asdict(MEASURED) | {"share": 1.5}}), r"service\.share=1\.5 must be at most 1"),
        (json.dumps({"service": asdict(MEASURED) | {"step_s": 0, "row_s": 0}}), "would sample in no time"),
    ],
)
def test_a_file_that_is_no_service_is_named(tmp_path, text, problem):
    path = tmp_path / "service.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        load_service(path)


def test_typical_episodes_are_as_long_as_the_workload_says_and_repeat():
    config = load_config(None, "train.prompts_per_step=97", "engine.kind=sglang")
    work = workload_of(config, preset("8b"))
    groups = typical_groups(config, work, 0)
    calls = [call for group in groups for turns in group.episodes for turn in turns for call in turn.calls]
    assert len(groups) == 97 and len(calls) == work.num_calls
    assert sum(group.prompt_tokens for group in groups) / 97 == pytest.approx(work.prompt_tokens, rel=0.2)
    assert sum(call.report_tokens for call in calls) / len(calls) == pytest.approx(work.report_tokens, rel=0.1)
    assert typical_groups(config, work, 0) == groups != typical_groups(config, work, 1)


def test_a_model_that_is_too_large_for_a_device_has_servers_of_several():
    assert [server_devices(EngineConfig(), preset(size), H100) for size in ("8b", "32b")] == [1, 2]
    assert server_devices(EngineConfig(), preset("8b"), DEVICES["v6e"]) == 2
    given = load_config("configs/8b_8x80gb.yaml", "engine.num_servers=1")
    assert server_devices(given.engine, preset("8b"), H100) == len(given.engine.gpus) == 4


def test_the_sweep_is_drawn_only_where_asked_and_only_where_there_is_one(tmp_path):
    path = tmp_path / "splits.png"
    plan_of(load_config(None, *SPLIT), png=OutputFile(path, "test"))
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("file", "device", "why"),
    [
        ("8b_8x80gb", "h100", "8 x h100 can be shared in one way only, 1 x 4 x 1 + 4: no learner on another number"),
        ("8b_8x80gb_embedded", "h100", "with engine.kind=jax all of 8 x h100 learn and sample"),
        ("smoke_cpu", "cpu", "the seconds of cpu are not known"),
    ],
)
def test_a_sweep_of_one_split_says_of_how_many_devices_and_why(tmp_path, file, device, why):
    with pytest.raises(ValueError, match=re.escape(f"s.png has nothing to compare: {why}")):
        plan_of(load_config(f"configs/{file}.yaml"), device, png=OutputFile(tmp_path / "s.png", "test"))


def test_a_cold_start_is_drawn_by_its_rows(tmp_path, capsys, monkeypatch):
    path = tmp_path / "rows.png"
    out = said(capsys, sft, monkeypatch, "--plan", "--config", "configs/sft_8b.yaml", "--png", str(path))
    assert "a step by its rows" in out and path.read_bytes().startswith(b"\x89PNG")
    config = load_config("configs/sft_8b.yaml", "model.path=tiny", schema=SftConfig)
    with pytest.raises(ValueError, match=r"--png .* has nothing to draw: the seconds of cpu are not known"):
        imitation_plan_of(config, "cpu", png=OutputFile(path, "--plan --png"))


def test_a_larger_batch_needs_more_and_a_larger_step_does_not():
    config = load_config("configs/sft_8b.yaml", schema=SftConfig)
    plan = make_imitation_plan(config, preset("8b"), H100)
    peaks = dict(plan.peaks)
    assert list(peaks) == [8, 16, 32] and sorted(peaks.values()) == list(peaks.values())
    assert peaks[8] == plan.memory.peak_bytes
    rows = replace(config, sft=replace(config.sft, rows_per_step=64))
    assert make_imitation_plan(rows, preset("8b"), H100).memory == plan.memory


def test_a_plan_of_imitation_has_seconds_by_rows(capsys, monkeypatch):
    out = said(capsys, sft, monkeypatch, "--plan", "--config", "configs/sft_8b.yaml")
    assert max(map(len, out.splitlines())) <= 100
    rows = {line.split()[0]: line.split() for line in out.splitlines() if "262,144" in line or "524,288" in line}
    assert rows["32"][-1] == "sft.rows_per_step"
    assert float(rows["64"][4]) == pytest.approx(2 * float(rows["32"][4]), abs=0.1)
    assert "8 x 8,192 tokens fits" in out and "largest pack.row_tokens with pack.num_rows=8: " in out
    assert "decoding is not in the seconds: up to 2,048 frames of a step" in out  # 32 rows of a trace of 64


def test_a_plan_of_imitation_without_a_peak_has_no_seconds(capsys, monkeypatch):
    settings = ("model.path=tiny", "data.train=traces.jsonl", "model.dtype=float32")
    out = said(capsys, sft, monkeypatch, "--plan", "--device", "cpu", "--config", "configs/sft_8b.yaml", *settings)
    assert "not estimated" in out and "not judged: the memory of cpu is not known" in out


@pytest.mark.parametrize(
    ("settings", "ways"),
    [
        (("model.path=32b", "sft.rows_per_step=8"), {"optim.offload", "mesh.fsdp"}),
        (("model.path=4b", "mesh.fsdp=1", "pack.num_rows=1"), {"optim.offload", "mesh.fsdp"}),
        (("pack.num_rows=32", "pack.row_tokens=32768"), {"pack.num_rows", "pack.row_tokens", "mesh.fsdp"}),
        (("mesh.fsdp=32", "pack.num_rows=32", "pack.row_tokens=262144"), {"pack.row_tokens", "mesh.fsdp"}),
    ],
)
def test_imitation_that_does_not_fit_is_told_what_does(capsys, monkeypatch, settings, ways):
    command = ("--plan", "--config", "configs/sft_8b.yaml", *settings)
    out = said(capsys, sft, monkeypatch, *command)
    advice = [line.removeprefix("  enough: ") for line in out.splitlines() if line.startswith("  enough: ")]
    assert "DOES NOT FIT" in out and {one.partition("=")[0] for one in advice} == ways
    for one in advice:
        changed = re.split("[,;]", one)[0].split()
        assert " DOES NOT FIT" not in said(capsys, sft, monkeypatch, *command, *changed)
