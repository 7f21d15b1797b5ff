"""Step time: hand-computed parts, the order of variants, and figures from compiled programs and the paper."""

from dataclasses import replace

import pytest

from model_port.config import preset
from paravt_jax import train
from paravt_jax.config import EngineConfig, load_config
from paravt_jax.plan import step_time as closed_form
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.plan import make_plan, model_config
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_rates import LOW
from paravt_jax.plan.step_time import StepTime, server_devices, step_time

H100, V5P = DEVICES["h100"], DEVICES["v5p"]


def step_of(name: str, *settings: str, device: str = "h100") -> StepTime:
    config = load_config(f"configs/{name}.yaml", *settings)
    model, _ = model_config(config.model.path)
    step = make_plan(PlannedRl.of(config, model), DEVICES[device]).step
    assert step is not None
    return step


def test_the_interval_of_seven_learners_and_one_server_contains_the_published_250_seconds():
    learners = ("mesh.data=7", "mesh.fsdp=1", "pack.num_rows=7")
    step = step_of("8b_8x80gb", *learners, "engine.num_servers=1", "engine.gpus=[7]")
    assert step.seconds.low < 250 < step.seconds.high


def test_the_interval_of_four_learners_and_four_servers_contains_the_sum_of_measured_parts():
    low, high = step_of("8b_8x80gb").seconds
    assert low < 40 < high < 10 * low


@pytest.mark.parametrize(
    ("name", "device", "compiled_ms"),
    [
        ("8b_8x80gb_embedded", "h100", 2.4),
        ("8b_v5p8", "v5p", 4.6),
    ],
)
def test_the_decode_interval_contains_the_time_of_the_compiled_sampler(name, device, compiled_ms, monkeypatch):
    """512 tokens for each of 56 episodes, all together, at both ends of the interval."""
    monkeypatch.setattr(closed_form, "HIGH", closed_form.HIGH._replace(calls=1.0, tail=1.0))
    low, high = (1000 * seconds / 512 for seconds in step_of(name, device=device).parts["decode"])
    assert low < compiled_ms < high


def test_decode_time_is_the_bytes_of_weights_and_cache_over_bandwidth():
    step = step_of("8b_8x80gb", "rollout.dispatch=none", "reward.tool_reward=false")
    weights, row = 2 * (6_945_767_424 + 151_936 * 4096), (1988 + 512) * 2 * 2 * 36 * 8 * 128
    assert step.parts["decode"].low == pytest.approx(512 * (weights + 14 * row) / (0.8 * 3.35e12))


def test_more_servers_slow_no_part_down():
    few, many = step_of("8b_8x80gb"), step_of("8b_8x80gb", "engine.num_servers=7", "engine.gpus=[]")
    assert all(many.parts[name] <= few.parts[name] for name in few.parts) and many.seconds < few.seconds


def test_the_sampler_splits_heads_over_a_hosts_devices_whatever_the_learners_mesh():
    split = step_of("8b_8x80gb_embedded").parts["decode"]
    assert split == step_of("8b_8x80gb_embedded", "mesh.fsdp=1", "mesh.tensor=8", "pack.num_rows=1").parts["decode"]


def test_a_small_cache_decodes_fewer_requests_together():
    small = step_of("8b_8x80gb_embedded", "engine.cache_tokens=32768").parts["decode"]
    assert small.low > 2 * step_of("8b_8x80gb_embedded").parts["decode"].low


def test_staleness_overlaps_rollouts_with_the_update_at_the_low_end_only():
    ahead, waited = step_of("8b_8x80gb"), step_of("8b_8x80gb", "train.max_staleness=0")
    assert waited.seconds.low == pytest.approx(ahead.seconds.low + ahead.parts["update"].low)
    assert waited.seconds.high == ahead.seconds.high == pytest.approx(sum(part.high for part in ahead.parts.values()))


def test_the_embedded_engine_has_no_publish_part():
    assert "publish" not in step_of("8b_8x80gb_embedded").parts and "publish" in step_of("8b_8x80gb").parts


def test_small_tpu_slices_have_fewer_links():
    assert [V5P.links_frac(count) for count in (4, 8, 64)] == [1 / 3, 1 / 2, 1]
    assert [DEVICES["v6e"].links_frac(count) for count in (4, 16)] == [1 / 2, 1]
    assert H100.links_frac(4) == 1


def test_a_plan_prints_the_interval_and_its_bound(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--plan", "--config", "configs/8b_8x80gb.yaml"])
    train.main()
    lines = capsys.readouterr().out
    assert "  a step " in lines and "s, bound by pictures on servers' CPUs; least certain: " in lines


def test_a_device_without_a_data_sheet_has_no_interval():
    run = PlannedRl.of(load_config("configs/8b_8x80gb.yaml"), preset("8b"))
    assert step_time(run, DEVICES["cpu"], 1.0) is None
    assert step_time(run, replace(H100, peak_tflops=None), 1.0) is None


def test_a_large_model_gets_several_devices_per_server():
    assert [server_devices(EngineConfig(), preset(size), H100) for size in ("8b", "32b")] == [1, 2]
    assert server_devices(EngineConfig(), preset("8b"), DEVICES["v6e"]) == 2
    engine = load_config("configs/8b_8x80gb.yaml", "engine.num_servers=1").engine
    assert server_devices(engine, preset("8b"), H100) == len(engine.gpus) == 4


def test_one_decoder_takes_seven_times_as_long_for_seven_prompts():
    single, parallel = step_of("8b_8x80gb", "video.num_workers=1"), step_of("8b_8x80gb")
    assert single.parts["frames on CPUs"].low == 7 * parallel.parts["frames on CPUs"].low == 7 * LOW.overview_s
