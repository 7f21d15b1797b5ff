"""Step time: hand-computed parts, the order of variants, and figures from compiled programs and the paper."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest

from model_port.config import preset
from paravt_jax import train
from paravt_jax.config import EngineConfig, load_config
from paravt_jax.plan.devices import DEVICES
from paravt_jax.plan.memory import values_on
from paravt_jax.plan.plan import make_plan, model_config
from paravt_jax.plan.remat import planned_memory
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.step_time import (
    PUBLISHED,
    Interval,
    Samplers,
    StepParts,
    StepRates,
    StepTime,
    best,
    server_devices,
    step_time,
    worst,
)
from paravt_jax.plan.workload import frame_flops, token_flops

H100, LOW, HIGH = DEVICES["h100"], best(PUBLISHED), worst(PUBLISHED)


def run_of(name: str, *settings: str) -> PlannedRl:
    config = load_config(f"configs/{name}.yaml", *settings)
    return PlannedRl.of(config, model_config(config.model.path)[0])


def step_of(name: str, *settings: str, device: str = "h100", rates: StepRates = PUBLISHED) -> StepTime:
    step = step_time(run_of(name, *settings), DEVICES[device], update_s(name, *settings, device=device), rates)
    assert step is not None
    return step


def between(low: Mapping[str, float], high: Mapping[str, float]) -> StepRates:
    return {name: rate._replace(best=low[name], worst=high[name]) for name, rate in PUBLISHED.items()}


def fixed(**values: float) -> StepRates:
    """Returns the published rates with fixed values for some."""
    return between(LOW | values, HIGH | values)


@cache
def update_s(name: str, *settings: str, device: str) -> float | None:
    return make_plan(run_of(name, *settings), DEVICES[device]).update_s


def test_the_interval_of_seven_learners_and_one_server_contains_the_published_250_seconds():
    learners = ("mesh.data=7", "mesh.fsdp=1", "pack.num_rows=7")
    settings = *learners, "engine.num_servers=1", "engine.gpus=[7]"
    low, high = step_of("8b_8x80gb", *settings).seconds
    assert low < 250 < high
    slower = between(LOW, HIGH | {"picture_s": 0.023})  # docs/machines.md
    assert step_of("8b_8x80gb", *settings, rates=slower).seconds.high == pytest.approx(250, rel=0.01)


def test_the_interval_of_four_learners_and_four_servers_contains_the_sum_of_measured_parts():
    low, high = step_of("8b_8x80gb").seconds
    assert low < 40 < high < 10 * low


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "device", "compiled_ms"), [("8b_8x80gb_embedded", "h100", 2.4), ("8b_v5p8", "v5p", 4.6)]
)
def test_the_decode_interval_contains_the_time_of_the_compiled_sampler(name, device, compiled_ms):
    """512 tokens for each of 56 episodes, all together, at both ends of the interval."""
    rates = fixed(calls=1.0, tail=1.0, hop_s=0.0)  # it has bytes only
    low, high = (1000 * seconds / 512 for seconds in step_of(name, device=device, rates=rates).parts["decode"])
    assert low < compiled_ms < high


@pytest.mark.slow
@pytest.mark.parametrize(("chunk_tokens", "tokens_per_s"), [(256, 10_240), (1024, 39_080)])
def test_the_prefill_interval_contains_an_h200s_seconds(monkeypatch, chunk_tokens, tokens_per_s):
    """docs/benchmarks: the 8B, first with stacked weights and the plain form, later with the kernel."""
    monkeypatch.setattr("model_port.sampler.sampler.CHUNK_TOKENS_ELSEWHERE", chunk_tokens)
    settings = ("rollout.dispatch=none", "reward.tool=none", "lora.rank=0")
    step = step_of("8b_lora_1x80gb", *settings, device="h200")
    run = run_of("8b_lora_1x80gb", *settings)
    low, high = (run.work.num_groups * run.work.prompt_tokens / seconds for seconds in step.parts["prefill"])
    assert high < tokens_per_s < low


def test_decode_time_is_the_bytes_of_weights_and_cache_over_bandwidth():
    step = step_of("8b_8x80gb", "rollout.dispatch=none", "reward.tool=none")
    weights, row = 2 * (6_945_767_424 + 151_936 * 4096), (1988 + 512) * 2 * 2 * 36 * 8 * 128
    moved = 1.3 * 512 * weights + 14 * 512 * row  # after 512 tokens, most requests have ended
    assert step.parts["decode"].low == pytest.approx(moved / (0.81 * 3.35e12))


def test_a_token_crosses_the_links_of_a_slice_73_times():
    """On v5p 2x2x1 the all-reduce of 56 rows of 4,096 values sends 3/4 twice over two links of 75 GB/s.

    The longest request has twice the mean's tokens, so 28 of the 56 rows have a request on average.
    """
    at_once = fixed(calls=0.0, tail=2.0)
    settings = ("rollout.dispatch=none", "reward.tool=none", "engine.cache_tokens=262144")
    step = step_of("8b_v5p8", *settings, device="v5p", rates=at_once)
    weights, row = 2 * (6_945_767_424 + 151_936 * 4096), (1988 + 512) * 2 * 2 * 36 * 8 * 128
    reads_s = (weights + 28 * row) / (4 * 0.81 * 2.77e12)
    hops_s = 73 * (6e-6 + 2 * 3 / 4 * 56 * 4096 * 2 / 150e9)
    assert step.parts["decode"].low == pytest.approx(1024 * (reads_s + hops_s))


def test_pictures_are_sent_again_after_each_turn_with_calls():
    """56 first requests and 56 x 2.5 later ones of 24.8 frames, and 56 x 2.5 calls of 16 frames: 7,101 pictures."""
    high = step_of("8b_8x80gb").parts["pictures on servers' CPUs"].high
    assert high == pytest.approx(2 / 7 * 0.030 * (56 * 3.5 * 24.8 + 140 * 16))  # two of seven groups on one server


def test_an_update_grows_with_the_tokens_of_the_calls():
    """With 0.21 calls of 256 tokens an episode has 512 - 202 tokens after the prompt, with 2.5 it has 512 + 384."""
    run = run_of("8b_8x80gb")
    update_s = make_plan(run).update_s
    low, high = step_of("8b_8x80gb").parts["update"]
    assert low == pytest.approx(0.78 * update_s * (1988 + 8 * 310) / (1988 + 8 * 512))
    assert high == pytest.approx(1.5 * update_s * (1988 + 8 * 896) / (1988 + 8 * 512))


def test_the_slowest_of_the_concurrent_parts_sets_the_best_time_of_a_step():
    for slow in ({"overview_s": 100.0}, {"picture_s": 1.0}, {"matmul_frac": 0.001}, {"update": 100.0}):
        step = step_of("8b_8x80gb", rates=fixed(**slow))
        low = {name: part.low for name, part in step.parts.items()}
        sampler_s = sum(low.pop(name) for name in ("vision tower", "prefill", "decode"))
        assert step.seconds.low == low.pop("publish") + max(sampler_s, *low.values())


@pytest.mark.parametrize(
    ("name", "share", "num_devices"), [("8b_8x80gb", 2 / 7, 1), ("8b_8x80gb_embedded", 1, 8)], ids=["server", "all"]
)
def test_a_sampler_encodes_an_overview_per_group_and_the_frames_of_every_call(name, share, num_devices):
    """A server has two of seven groups; an episode has a call."""
    run = run_of(name)
    seconds = StepParts(run, H100, LOW | {"calls": 1.0}).seconds(1.0)
    flops = (7 * 24.8 + 56 * 16) * frame_flops(run.model, 196)
    assert seconds["vision tower"] == pytest.approx(share * flops / (num_devices * 0.7 * 989e12))


def test_a_server_prefills_prompts_results_of_calls_and_prompts_of_sub_agents():
    run = run_of("8b_8x80gb")
    parts = StepParts(run, H100, LOW | {"calls": 1.0})
    flops = sum(
        number * tokens * token_flops(run.model, tokens) for number, tokens in ((7, 1988), (56, 512), (56, 1460))
    )
    assert parts.seconds(1.0)["prefill"] == pytest.approx(2 / 7 * flops / (0.7 * 989e12))


def test_a_server_samples_as_many_requests_as_its_cache_holds_and_in_bfloat16():
    run = run_of("8b_8x80gb", "rollout.dispatch=none", "reward.tool=none", "model.dtype=float32")
    cache, row = 0.8 * 79.1 * 2**30 - 2 * 8_767_123_696, (1988 + 512) * 2 * 2 * 36 * 8 * 128
    assert StepParts(run, H100, HIGH).sampler == (4, 1, cache // row, 1.0)
    assert StepParts(run, DEVICES["b200"], HIGH).sampler.rows == 256  # the bound of a server


def test_a_dialogue_has_no_more_later_turns_than_calls_turns_or_the_configs_bound():
    for calls, turns, bound, later in ((0.5, 4.0, 9, 0.5), (2.5, 2.0, 9, 1.0), (2.5, 4.0, 1, 1.0), (2.5, 4.0, 9, 2.5)):
        run = run_of("8b_8x80gb")
        run = replace(run, rollout=replace(run.rollout, max_turns=bound))
        parts = StepParts(run, H100, LOW | {"calls": calls, "turns": turns, "length": 2.0})
        assert parts.later_turns == 56 * later
        assert parts.work.own_tokens == 2 * 256  # of the response's 512 tokens, 256 are a report


def test_more_servers_never_increase_a_times_part():
    few, many = step_of("8b_8x80gb"), step_of("8b_8x80gb", "engine.num_servers=7", "engine.gpus=[]")
    assert all(many.parts[name] <= few.parts[name] for name in few.parts) and many.seconds < few.seconds


def test_every_host_starts_servers_of_its_own(tmp_path):
    two = ("mesh.data=2", "pack.num_rows=8", "hosts.coordinator=a:1", "hosts.num=2")
    one_high, two_high = (step_of("8b_8x80gb", *hosts).parts["decode"].high for hosts in ((), two))
    assert two_high < one_high
    servers = tmp_path / "servers.txt"
    servers.write_text("# eight\n" + "".join(f"http://servers:{30_000 + n}\n" for n in range(8)))
    listed = run_of("8b_2nodes", f"engine.urls=[{servers}]")
    assert samplers_of(listed).replicas == 8 == samplers_of(run_of("8b_2nodes")).replicas
    assert samplers_of(run_of("8b_2nodes", "engine.urls=[absent.txt]")).replicas == 1
    assert samplers_of(run_of("8b_2nodes", "engine.urls=[http://a:1,http://b:1,http://c:1]")).replicas == 3


def samplers_of(run: PlannedRl) -> Samplers:
    return StepParts(run, H100, LOW).sampler


@pytest.mark.slow
def test_the_sampler_splits_heads_over_a_hosts_devices_for_any_learner_mesh():
    split = step_of("8b_8x80gb_embedded").parts["decode"]
    assert split == step_of("8b_8x80gb_embedded", "mesh.data=8", "mesh.fsdp=1").parts["decode"]


def test_replicas_without_fsdp_copy_the_weights_for_rollouts_only():
    """Qwen2.5-VL 7B has four key/value heads, so eight devices of a host have two copies of its weights."""
    name, mesh = "contrast/qwen25vl_7b_paragrpo", ("mesh.data=2", "mesh.fsdp=1", "mesh.tensor=4", "pack.num_rows=2")
    run = run_of(name, *mesh, "engine.kind=jax", "engine.urls=[]", "train.max_staleness=0")
    assert StepParts(run, H100, HIGH).sampler.devices == 4
    assert copies_of(run) == {"rollout": 2 * values_on(run.update.mesh, run.model)}


@pytest.mark.parametrize(
    ("device", "name", "settings", "share"),
    [
        ("h100", "4b_1x80gb", (), 1),  # float32 masters in the activations' dtype
        ("v5p", "4b_1x80gb", (), 1),
        ("h100", "4b_1x80gb", ("model.dtype=float32",), 1.65),  # each layer in separate arrays
        ("v5p", "4b_1x80gb", ("model.dtype=float32",), 0),
        ("h100", "8b_lora_1x80gb", (), 0.81),
        ("v5p", "8b_lora_1x80gb", (), 0.02),  # adapters
    ],
)
def test_a_device_without_a_mesh_copies_only_changed_tensors_for_rollouts(device, name, settings, share):
    run = run_of(name, *settings)
    copies = copies_of(run, DEVICES[device])
    assert copies.get("rollout", 0) == pytest.approx(2 * share * values_on(run.update.mesh, run.model), rel=0.05)
    assert copies.keys() <= {"rollout"}


def copies_of(run, device=H100):
    """Returns the bytes of the sampler's copy by phase."""
    memory = planned_memory(run, device)
    parts = {"resident": memory.resident} | memory.phases
    return {name: part["copy for sampling"] for name, part in parts.items() if "copy for sampling" in part}


@pytest.mark.slow
def test_an_embedded_sampler_in_float32_moves_twice_the_bytes():
    rates, settings = best(fixed(calls=0.0, hop_s=0.0)), ("8b_8x80gb_embedded", "engine.cache_tokens=524288")
    runs = [run_of(*settings, f"model.dtype={dtype}") for dtype in ("bfloat16", "float32")]
    half, whole = (StepParts(run, H100, rates).seconds(1.0) for run in runs)
    for name in ("decode", "prefill"):
        assert whole[name] == pytest.approx(2 * half[name], rel=0.01), name
    small = [replace(run, engine=replace(run.engine, cache_tokens=32_768)) for run in runs]
    assert len({StepParts(run, H100, rates).sampler.rows for run in small}) == 1  # of tokens, whose bytes double


@pytest.mark.slow
def test_the_embedded_sampler_prefills_whole_chunks():
    """Seven prompts of 1,988 tokens and 56 calls of 1,460 take two chunks of 1,024 each."""
    rates = fixed(calls=1.0, turns=1.0)
    run = run_of("8b_lora_1x80gb")
    parts = StepParts(run, H100, best(rates))
    num_tokens = (7 + 56) * 2048
    chunk_s = parts.weights_s / 1024
    assert parts.prefill_s(1e15) == pytest.approx(num_tokens * (token_flops(run.model, 2048, 1024) / 1e15 + chunk_s))


@pytest.mark.slow
def test_only_the_embedded_sampler_reads_adapters_for_a_token():
    """The 8B at rank 64: A has 6 x 4,096 + 12,288 inputs, and B is block-diagonal for q, k, v and for gate, up."""

    def weights_s(*settings: str) -> float:
        return StepParts(run_of("8b_lora_1x80gb", *settings), H100, best(PUBLISHED)).weights_s

    a, b = 6 * 4096 + 12288, 3 * (4096 + 2 * 1024) + 4096 + 2 * 2 * 12288 + 4096
    base = 36 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 12288) + 151_936 * 4096
    assert weights_s() / weights_s("lora.rank=0") == pytest.approx(1 + 36 * 64 * (a + b) / base)
    servers = "engine.kind=sglang", "engine.urls=[http://a:1]"
    assert weights_s(*servers) == weights_s(*servers, "lora.rank=0")


@pytest.mark.slow
def test_a_small_cache_decodes_fewer_requests_together():
    at_once = fixed(calls=1.0, tail=1.0)
    small = step_of("8b_8x80gb_embedded", "engine.cache_tokens=32768", rates=at_once).parts["decode"]
    assert small.low > 2 * step_of("8b_8x80gb_embedded", rates=at_once).parts["decode"].low


def test_staleness_overlaps_rollouts_with_the_update_at_the_low_end_only():
    ahead, waited = step_of("8b_8x80gb"), step_of("8b_8x80gb", "train.max_staleness=0")
    assert waited.seconds.low == pytest.approx(ahead.seconds.low + ahead.parts["update"].low)
    assert waited.seconds.high == ahead.seconds.high == pytest.approx(sum(part.high for part in ahead.parts.values()))


def test_an_embedded_engine_and_the_update_share_their_devices():
    """They alternate on them even if rollouts run ahead; only decoding of videos can overlap."""
    ahead = step_of("8b_8x80gb_embedded", "train.max_staleness=1", "video.num_workers=64")
    on_devices = sum(ahead.parts[name].low for name in ("vision tower", "prefill", "decode", "update"))
    assert ahead.seconds.low == max(on_devices, ahead.parts["frames on CPUs"].low)


@pytest.mark.slow
def test_servers_without_room_for_the_model_are_named():
    settings = ("model.path=32b", "mesh.fsdp=4")
    assumed = make_plan(run_of("8b_8x80gb", *settings), DEVICES["a100-40"]).assumptions
    named = [line for line in assumed if line.startswith("a server on 1 x a100-40 has no room for the model")]
    assert len(named) == 1 and "62.1 of 31.5 GiB" in named[0]
    assert not any("no room" in line for line in make_plan(run_of("8b_8x80gb"), H100).assumptions)


def test_the_embedded_engine_has_no_publish_part():
    assert "publish" not in step_of("8b_8x80gb_embedded").parts and "publish" in step_of("8b_8x80gb").parts


@pytest.mark.slow
def test_servers_get_the_adapter_alone():
    """64 · (4096 + 4096) for Q and O, 64 · (4096 + 1024) for K and V, 64 · (4096 + 12288) for the MLP's three."""
    adapter_bytes = 4 * 36 * 64 * (2 * 8192 + 2 * 5120 + 3 * 16384)
    publish = step_of("8b_lora_1x80gb", "engine.kind=sglang", "engine.urls=[http://a:1]").parts["publish"]
    assert publish.low == pytest.approx(adapter_bytes / LOW["publish_bytes_per_s"])
    assert adapter_bytes == pytest.approx(0.65 * 2**30, rel=0.01)


def test_a_step_names_the_two_rates_that_change_it_most():
    """The busiest server has 534 pictures: 16 ms more each are 8.5 s, 10 s more an overview, the update below 1 s."""
    worse = LOW | {"picture_s": 0.024, "overview_s": 15.0, "update": 1.275}
    picture, overview = "a picture on the server's CPU (8 to 24 ms)", "an overview on a CPU core (5 to 15 s)"
    assert step_of("8b_8x80gb", rates=between(LOW, worse)).depends_on == (overview, picture)
    many = between(LOW | {"calls": 2.5}, worse | {"calls": 2.5})
    assert step_of("8b_8x80gb", rates=many).depends_on == (picture, overview)
    assert Interval(2.0, 8.0).middle == 4.0  # of the others; rates differ by factors
    alone = between(LOW, LOW | {"calls": 2.5})
    assert step_of("8b_8x80gb", rates=alone).depends_on == ("calls per episode (0.21 to 2.5)",)


@pytest.mark.slow
def test_every_rate_is_best_at_the_low_end():
    step_s = step_of("8b_8x80gb_embedded").seconds
    best_s = step_of("8b_8x80gb_embedded", rates=between(LOW, LOW)).seconds
    for name in PUBLISHED:
        worse = step_of("8b_8x80gb_embedded", rates=between(LOW, LOW | {name: HIGH[name]}))
        assert best_s.high <= worse.seconds.high <= step_s.high


def test_a_plan_prints_the_interval_and_its_bound(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train", "--plan", "--config", "configs/8b_8x80gb.yaml"])
    train.main()
    lines = capsys.readouterr().out
    assert "  a step " in lines and "s, bound by pictures on servers' CPUs; depends most on: calls" in lines


def test_a_device_without_a_data_sheet_has_no_interval():
    run = PlannedRl.of(load_config("configs/8b_8x80gb.yaml"), preset("8b"))
    assert step_time(run, DEVICES["cpu"], 1.0) is None
    assert step_time(run, replace(H100, peak_tflops=None), 1.0) is None


def test_a_large_model_gets_several_devices_per_server():
    assert [server_devices(EngineConfig(), preset(size), H100) for size in ("8b", "32b")] == [1, 2]
    assert server_devices(EngineConfig(), preset("8b"), DEVICES["v6e"]) == 2
    assert server_devices(EngineConfig(), preset("32b"), DEVICES["v5e"]) == 8  # the most, though it has no room
    engine = load_config("configs/8b_8x80gb.yaml", "engine.num_servers=1").engine
    assert server_devices(engine, preset("8b"), H100) == len(engine.gpus) == 4


@pytest.mark.slow
def test_overviews_are_decoded_by_all_workers():
    """Seven overviews of 5 s by one worker, and by the eight of the default; two of 22 s on each of four hosts."""
    assert step_of("8b_8x80gb", "video.num_workers=1").parts["frames on CPUs"].low == 7 * 5.0
    assert step_of("8b_8x80gb").parts["frames on CPUs"].low == 7 * 5.0 / 8
    assert step_of("8b_v6e16", device="v6e").parts["frames on CPUs"].high == 2 * 22.0 / 8
