"""Rates from a run's log: hand arithmetic on a synthetic log, a real run's log, and invalid logs."""

import argparse
import json

import pytest
from data_rows import write_lines
from training import QUICK, metrics_of, train_here

from model_port.tiny import make_tiny
from paravt_jax import train
from paravt_jax.bench import mesh
from paravt_jax.config import load_config, to_record
from paravt_jax.plan.calibrate import OF_DEVICES, Calibration, calibrated, device_rates
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.plan import make_plan, model_config
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_time import PUBLISHED
from paravt_jax.plan.tables import plan_of
from paravt_jax.run.directory import write_settings

H100, V5P = DEVICES["h100"], DEVICES["v5p"]
CONFIG = load_config("configs/8b_8x80gb.yaml")
WEIGHT_BYTES = 2 * 8_767_123_696
POLICY, CPU = {"calls", "turns", "length", "tail"}, {"overview_s"}


def metrics(step: int, **changes: float) -> dict:
    """Steps of 20 s on average. The second step has twice the calls, decoding, publishing and update of the first."""
    values = {
        "rollout/num_episodes": 56,
        "rollout/num_groups": 7,
        "rollout/tool_calls_mean": 1.0 * step,
        "rollout/turns_mean": 1.0 + step,
        "perf/video/decode_s": {1: 35.0, 2: 35.0 + 70.0}[step],  # totals
        "perf/video/decoded_frames": NUM_FRAMES * step,
        "perf/num_compiles": 0,
        "time/publish_s": 10.0 * step,
        "time/update_s": 3.0 * step,
        "time/step_s": {1: 16.0, 2: 24.0}[step],
        "time/rollout_s": 10.0,
    }
    return {"step": step} | values | changes


def segments(*sampled: int) -> list[dict]:
    return [{"kind": "prompt", "ids": [1] * 900}, *({"kind": "sampled", "ids": [1] * number} for number in sampled)]


def turn(num_tokens: int, latency_s: float, *reports: int) -> dict:
    """Makes a turn whose calls show the first frame of the overview and the 18th, once as a detail."""
    boxes = [None, (0.0, 0.0, 0.5, 0.5)]
    seen = [{"path": "a.mp4", "frames_s": [0.0, 17.0], "box": box} for box in boxes[: len(reports)]]
    calls = [{"segments": segments(number)} | frames for number, frames in zip(reports, seen, strict=True)]
    return {"token_span": [900, 900 + num_tokens], "latency_s": latency_s, "calls": calls}


VIDEOS = {"videos": [{"path": "a.mp4", "frames_s": [0.0, 8.0, 16.0, 24.0]}, {"path": "b.mp4", "frames_s": [0.0]}]}
NUM_FRAMES = 4 + 1 + 1 + 2  # frames of both overviews and of two calls, without the repeated first frame
EPISODES = [
    {"missing": False, "segments": segments(100), "turns": [turn(100, 1.0)]} | VIDEOS,
    {"missing": False, "segments": segments(150, 50), "turns": [turn(150, 1.5, 100, 50), turn(50, 9.0)]} | VIDEOS,
    {"missing": True, "id": "lost"},
]


@pytest.fixture
def log(tmp_path):
    """Writes a run's log and returns its directory."""

    def write(*rows, episodes=EPISODES, config=CONFIG, kind=H100.kind):
        write_settings(to_record(config), tmp_path, device_kind=kind)
        write_lines(tmp_path / "metrics.jsonl", rows)
        for row in rows:
            write_lines(tmp_path / "episodes" / f"{row['step']:06d}.jsonl", episodes)
        return tmp_path

    return write


def spread(first: float, second: float) -> tuple:
    """Returns the interval from 10 % to 90 % of the way between two steps' values."""
    return pytest.approx(first + 0.1 * (second - first)), pytest.approx(second - 0.1 * (second - first))


def ends(calibration: Calibration, name: str) -> tuple[float, float]:
    rate = calibration.rates[name]
    return rate.best, rate.worst


def measured(calibration: Calibration) -> set[str]:
    return PUBLISHED.keys() - calibration.kept.keys()


@pytest.mark.slow
def test_the_rates_of_policy_and_data_are_means_over_steps(log):
    calibration = calibrated(log(metrics(1), metrics(2)), H100)
    assert ends(calibration, "calls") == spread(1.0, 2.0)
    assert ends(calibration, "turns") == spread(2.0, 3.0)
    assert ends(calibration, "overview_s") == spread(35 / 7, 70 / 7)
    # Both steps have 100 + 200 + 150 tokens in two episodes with a call each; the plan has 256 and 256 per call.
    assert ends(calibration, "length") == spread(225 / 512, 225 / 512)
    # 100, and 200 with the longer of two reports sampled together.
    assert ends(calibration, "tail") == spread(300 / 200, 300 / 200)
    # Without calls the plan has 512 - 256 tokens.
    assert ends(calibrated(log(metrics(1), episodes=EPISODES[:1]), H100), "length") == spread(100 / 256, 100 / 256)


def test_the_rates_of_devices_are_work_over_measured_seconds(log):
    calibration = calibrated(log(metrics(1), metrics(2)), H100)
    slow, fast = WEIGHT_BYTES / 20, WEIGHT_BYTES / 10
    assert ends(calibration, "publish_bytes_per_s") == spread(fast, slow)
    # At 1.5 calls and 2.5 requests an update has 1988 + 8 x 640 tokens per group, and the plan's 1988 + 8 x 512.
    model, _ = model_config(CONFIG.model.path)
    roofline = make_plan(PlannedRl.of(CONFIG, model), H100).update_s * (1988 + 8 * 640) / (1988 + 8 * 512)
    assert ends(calibration, "update") == spread(3 / roofline, 6 / roofline)
    # Long turns take 10 ms per token; 14 rows of 2,628 tokens on each server at full bandwidth take less.
    full_s = (2 * (6_945_767_424 + 151_936 * 4096) + 14 * 2628 * 2 * 2 * 36 * 8 * 128) / 3.35e12
    assert ends(calibration, "memory_frac") == spread(full_s / 0.010, full_s / 0.010)
    assert ends(calibration, "weight_passes") == (1.0, 1.0)


@pytest.mark.slow
def test_an_update_as_fast_as_planned_has_a_rate_of_one(log):
    """With the recomputation that model.remat=auto chooses on this device."""
    config = load_config("configs/paragrpo_8b.yaml", "rollout.dispatch=none", "reward.tool=none")
    plan = make_plan(PlannedRl.of(config, model_config(config.model.path)[0]), H100)
    assert not plan.remat.startswith("remat: full")
    run_dir = log(metrics(1) | {"rollout/tool_calls_mean": 0.0, "time/update_s": plan.update_s}, config=config)
    assert ends(calibrated(run_dir, H100), "update") == (pytest.approx(1.0), pytest.approx(1.0))


def test_rollouts_bound_the_time_of_a_picture(log):
    """56 + 84 requests of 24.8 frames and 84 calls of 16 are 4,816 pictures, in 20 s on four servers."""

    def of_steps(config=CONFIG, **changes: float) -> Calibration:
        return calibrated(log(*(metrics(step) | changes for step in (1, 2)), config=config), H100)

    assert ends(of_steps(), "picture_s") == (0.008, pytest.approx(20 * 4 / 4816))
    fast, slow = of_steps(**{"time/step_s": 5.0}), of_steps(**{"time/step_s": 100.0})
    assert ends(fast, "picture_s") == (pytest.approx(5 * 4 / 4816), pytest.approx(5 * 4 / 4816))
    assert ends(slow, "picture_s") == (0.008, 0.030) and "picture_s" in slow.kept
    waiting = load_config("configs/8b_8x80gb.yaml", "train.max_staleness=0")
    assert ends(of_steps(waiting), "picture_s") == (0.008, pytest.approx(10 * 4 / 4816))


def test_another_kind_of_device_takes_only_the_rates_of_policy_and_data(log):
    run_dir = log(metrics(1), metrics(2))
    assert measured(calibrated(run_dir, V5P)) == POLICY | CPU | {"picture_s"}
    assert calibrated(run_dir, V5P).kept["update"] == "the run's device is NVIDIA H100 80GB HBM3, not TPU v5"
    assert measured(calibrated(run_dir, H100)) == PUBLISHED.keys() - {"matmul_frac", "hop_s"}


def test_steps_that_compile_and_publishes_that_send_nothing_are_left_out(log):
    rows = [metrics(step) | {"perf/num_compiles": 3.0, "time/publish_s": 0.001} for step in (1, 2)]
    calibration = calibrated(log(*rows), H100)
    assert {"update", "publish_bytes_per_s"} <= calibration.kept.keys()
    assert ends(calibration, "update") == (PUBLISHED["update"].best, PUBLISHED["update"].worst)


def test_only_the_newest_steps_count_and_their_episodes_may_be_gone(log, monkeypatch):
    monkeypatch.setattr("paravt_jax.plan.calibrate.MAX_STEPS", 2)
    newest = metrics(2) | {"step": 3, "rollout/turns_mean": None}  # NaN in the log
    run_dir = log(metrics(1), metrics(1) | {"step": 2}, newest)
    (run_dir / "episodes" / "000003.jsonl").unlink()
    calibration = calibrated(run_dir, H100)
    assert calibration.kept.keys() == {"matmul_frac", "hop_s", "overview_s"}
    assert (ends(calibration, "calls"), ends(calibration, "turns")) == (spread(1.0, 2.0), (2.0, 2.0))


def test_a_resumed_run_counts_decoding_once(log):
    """The log starts after step 1, whose decoding the first total has; then the run was resumed."""
    rows = [metrics(2), metrics(1) | {"step": 3}]
    assert ends(calibrated(log(*rows), H100), "overview_s") == (35 / 7, 35 / 7)


def test_frames_from_the_cache_do_not_count_as_decoded(log):
    """The second step decodes half of its frames in half of the time; the third has all of them in the cache."""
    half = {"perf/video/decode_s": 35.0 + 35.0, "perf/video/decoded_frames": 1.5 * NUM_FRAMES}
    rows = [metrics(1), metrics(2) | half, metrics(2) | half | {"step": 3}]
    assert ends(calibrated(log(*rows), H100), "overview_s") == spread(35 / 7, 70 / 7)
    none = [metrics(step) | {"perf/video/decode_s": 0.0, "perf/video/decoded_frames": 0} for step in (1, 2)]
    assert "overview_s" in calibrated(log(*none), H100).kept


def test_the_embedded_engine_determines_no_rates_of_servers(log):
    config = load_config("configs/8b_8x80gb_embedded.yaml")
    kept = calibrated(log(metrics(1), metrics(2), config=config), H100).kept
    assert kept.keys() == {"matmul_frac", "hop_s", "picture_s", "publish_bytes_per_s"}


def test_measured_rates_narrow_the_interval(log):
    """The same work at rates that the log determines has a narrower interval than the published one."""
    run_dir = log(metrics(1), metrics(2))
    text, published = plan_of(CONFIG, "h100", run_dir), plan_of(CONFIG, "h100")
    assert f"measured: {run_dir}, steps 1 to 2, paravt/sft-8b.hf on NVIDIA H100 80GB HBM3" in " ".join(text.split())
    assert "calls per episode" in text and "0.21 to 2.5        1.1 to 1.9" in text
    step_s = [next(line for line in plan.splitlines() if "a step  " in line) for plan in (text, published)]
    low, high = (float(line.split()[-1]) for line in step_s)
    assert low < 0.7 * high


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("none", "it has no config.json; give the run_dir of train, or --json of `paravt check`"),
        ("nowhere", "it does not exist; give the run_dir of train, or --json of `paravt check`"),
        ("empty", "metrics.jsonl has no step with rollouts; wait until the run has logged one"),
        ("step", "metrics.jsonl has no step with rollouts; wait until the run has logged one"),
        ("rollouts", "metrics.jsonl has no step with rollouts; wait until the run has logged one"),
        ("list", "its log does not match a run of train: AttributeError"),
        ("episode", "its log does not match a run of train: KeyError"),
        ("tool", r"/config\.json: rollout\.tools=gone\.py:tool: there is no file .*gone\.py"),
        ("sft", "it is a cold start; give the run_dir of train, or --json of `paravt check`"),
    ],
)
def test_a_directory_without_a_log_is_a_one_line_error(broken, message, log, tmp_path):
    if broken not in ("none", "nowhere"):
        log(metrics(1), episodes=[{"missing": False, "segments": []}] if broken == "episode" else EPISODES)
    texts = {"empty": "", "list": "[1]\n", "step": json.dumps(metrics(1) | {"step": "one"}) + "\n"}
    texts["rollouts"] = json.dumps(metrics(1) | {"rollout/num_episodes": 0}) + "\n"
    if broken in texts:
        (tmp_path / "metrics.jsonl").write_text(texts[broken])
    if broken == "sft":
        (tmp_path / "config.json").write_text(json.dumps({"config": {"sft": {"num_steps": 3}}}))
    if broken == "tool":
        (tmp_path / "config.json").write_text(json.dumps({"config": {"rollout": {"tools": ["gone.py:tool"]}}}))
    with pytest.raises(ValueError, match=message):
        calibrated(tmp_path / "nowhere" if broken == "nowhere" else tmp_path, H100)


def test_a_log_needs_its_run_directory_and_no_path_of_its_settings(log):
    """The run may be copied from another machine, or read from another directory."""
    config = load_config("configs/smoke_cpu.yaml", "model.path=runs/gone/checkpoints/8")
    run_dir = log(metrics(1), config=config)
    with pytest.raises(ValueError, match="runs/gone/checkpoints/8 is not a local directory"):
        calibrated(run_dir, H100)
    make_tiny(run_dir / "hf_files")
    assert ends(calibrated(run_dir, H100), "calls") == (1.0, 1.0)


@pytest.mark.nightly
def test_the_log_of_a_real_run_replaces_the_rates_of_its_policy(tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "run"
    train_here(run_dir, *QUICK, "train.num_steps=2")
    config = ("--config", "configs/8b_8x80gb.yaml")
    monkeypatch.setattr("sys.argv", ["train", "--plan", *config, "--calibrate", str(run_dir)])
    train.main()
    text = " ".join(capsys.readouterr().out.split())
    assert "steps 1 to 2, tiny on cpu" in text and "the run's device is cpu, not NVIDIA H100" in text
    calibration = calibrated(run_dir, H100)
    assert measured(calibration) == POLICY | CPU
    calls = sorted(row["rollout/tool_calls_mean"] for row in metrics_of(run_dir))
    assert ends(calibration, "calls") == spread(*calls)
    assert ends(calibrated(run_dir, DEVICES["cpu"]), "calls") == ends(calibration, "calls")


def test_a_check_gives_the_rates_of_its_device(log, tmp_path):
    rates = device_rates(PlannedRl.of(CONFIG, model_config("8b")[0]), log(metrics(1), metrics(2)), H100)
    report = tmp_path / "check.json"
    stages = [{"stage": "memory", "facts": {}}, {"stage": "step", "facts": {"device": H100.kind, "rates": rates}}]
    report.write_text(json.dumps({"stages": stages}))
    assert measured(calibrated(report, H100)) == {*OF_DEVICES}
    of_run = calibrated(log(metrics(1), metrics(2)), H100)
    assert all(ends(calibrated(report, H100), name) == ends(of_run, name) for name in OF_DEVICES)
    assert measured(calibrated(report, V5P)) == set()
    report.write_text('{"stages": []}')
    with pytest.raises(ValueError, match=r"check\.json: it has no stage `step` of `paravt check`"):
        calibrated(report, H100)


def test_calibrate_needs_a_plan(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--config", "configs/smoke_cpu.yaml", "--calibrate", "runs/x"])
    with pytest.raises(SystemExit):
        train.main()
    assert "--calibrate needs --plan" in capsys.readouterr().err


@pytest.mark.slow
def test_meshes_are_compared_at_the_rates_of_a_log(log):
    def step_of(*options: str) -> tuple[list[float], list[str]]:
        parser = argparse.ArgumentParser()
        mesh.add_arguments(parser)
        on_one = ("--topology", "h100:8", "--plan-only", "--mesh", "1,4,1")
        result = mesh.run(parser.parse_args([*on_one, "--config", "configs/8b_8x80gb.yaml", *options]))
        return result["rows"][0]["run_step_s"], result["assumed"]

    run_dir = log(metrics(1), metrics(2))
    published, measured = step_of()[0], step_of("--calibrate", str(run_dir))
    expected = make_plan(PlannedRl.of(CONFIG, model_config("8b")[0]), H100, calibrated(run_dir, H100).rates).step
    assert measured[0] == list(expected.seconds) != published
    assert any(line.startswith(f"rates from {run_dir}, steps 1 to 2") for line in measured[1])
    with pytest.raises(ValueError, match="does not have"):
        step_of("--config", "configs/sft_8b.yaml", "--calibrate", str(run_dir))
