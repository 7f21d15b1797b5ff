"""The update's roofline: hand-computed cases, and how seconds change with shapes and settings."""

from dataclasses import replace

import numpy as np
import pytest

from model_port.config import LoraConfig, preset
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import DataConfig, PackConfig, PolicyConfig, SftConfig, TrainConfig
from paravt_jax.learner.packing import BatchShape
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.plan.collectives import Collective, among
from paravt_jax.plan.devices import DEVICES, Rates
from paravt_jax.plan.memory import Share, share_of, vision_residuals
from paravt_jax.plan.roofline import (
    GRADIENT_BYTES,
    LOGIT_PASSES,
    SCORE_BYTES,
    ProgramWork,
    StepSeconds,
    batch_works,
    forward_bytes,
    step_seconds,
    update_bytes,
    vision_bytes,
)
from paravt_jax.plan.run import PlannedRl, PlannedRun, PlannedSft
from paravt_jax.plan.step_time import PUBLISHED, best, worst
from paravt_jax.plan.workload import (
    Step,
    batch_flops,
    expert_rows,
    frame_flops,
    full_step,
    layer_params,
    needed_flops,
    row_pairs,
)

RATES = Rates(flops=100.0, memory_bytes=10.0, link_bytes=5.0)
EIGHT_B = preset("8b")


def planned(shape=(1, 8, 1), *, rows=1, row_tokens=8192, dtype="bfloat16", dims=EIGHT_B, **sections) -> PlannedRl:
    return PlannedRl.of(config_of(shape, rows=rows, row_tokens=row_tokens, dtype=dtype, **sections), dims)


def works(run: PlannedRun) -> dict[str, ProgramWork]:
    return batch_works(run.update, run.model, run.largest_batch(), "gpu")


def seconds(*args, dtype="bfloat16", **settings) -> StepSeconds:
    run = planned(*args, dtype=dtype, **settings)
    return step_seconds(works(run), full_step(run.largest_batch()), DEVICES["h100"].rates(dtype))


def needed(run: PlannedRun) -> float:
    return needed_flops(run.update, run.model, full_step(run.largest_batch()))


def test_only_the_patches_of_a_window_are_needed_in_most_layers():
    """Frames of 256 patches in windows of 8 x 8 patches; 4 of 32 layers attend to all: 64 + 192 / 8."""
    dims = preset("qwen2.5-vl-7b")
    assert (dims.vision.attended(256), dims.vision.attended(36)) == (88, 36)
    assert frame_flops(dims, 256) - frame_flops(dims, 256, 88) == 2 * 256 * 32 * 2 * (256 - 88) * 1280
    all_full = replace(dims, vision=replace(dims.vision, full_layers=tuple(range(32))))
    run, full = planned(dims=dims), planned(dims=all_full)
    spared = frame_flops(dims, 256) - frame_flops(dims, 256, 88)
    assert needed(full) - needed(run) == pytest.approx(run.largest_batch().num_frame_rows * spared)


def test_seconds_of_products_memory_and_collectives_add_up():
    work = ProgramWork(flops=300.0, memory_bytes=20.0, collectives=(Collective("all-gather", 40, 2),))
    assert work.seconds(RATES) == StepSeconds(3.0, 2.0, 4.0) and work.seconds(RATES).total == 9.0


def test_the_optimizer_runs_once_per_update_and_other_programs_once_per_batch():
    programs = {"gradients": ProgramWork(300.0, 20.0, ()), "apply_gradients": ProgramWork(0.0, 50.0, ())}
    shape = planned((1, 1, 1), row_tokens=64, dims=tiny_config()).largest_batch()
    step = Step(shape, num_batches=7, num_updates=3, num_tokens=11)
    assert step_seconds(programs, step, RATES) == StepSeconds(7 * 3.0, 7 * 2.0 + 3 * 5.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "row_tokens", "measured_s"),
    [(18, 4096, 0.328), (18, 8192, 0.614), (12, 16384, 0.983), (18, 32768, 4.072)],
)
def test_an_h200s_update_is_inside_the_planned_interval_of_the_roofline(layers, row_tokens, measured_s):
    """docs/benchmarks: the 8B's width, one row with an eighth of its tokens scored and 64 frames."""
    dims = replace(EIGHT_B, text=replace(EIGHT_B.text, num_layers=layers))
    update = planned((1, 1, 1), row_tokens=row_tokens, dims=dims).update
    shape = BatchShape(1, row_tokens, 196, 1, row_tokens // 8, 64)
    roofline = step_seconds(
        batch_works(update, dims, shape, "gpu"), full_step(shape), DEVICES["h200"].rates("bfloat16")
    )
    low, high = (end["update"] * roofline.total for end in (best(PUBLISHED), worst(PUBLISHED)))
    assert low < measured_s < high


@pytest.mark.slow
def test_longer_rows_take_more_time_per_token():
    short, middle, long = (seconds(row_tokens=tokens).total for tokens in (8192, 16384, 32768))
    assert 2 * short < middle and 2 * middle < long


def test_full_recomputation_takes_eight_flops_per_parameter_and_token():
    parameters, tokens = layer_params(EIGHT_B), 8 * 8192
    floor = 8 * parameters * tokens / 8 / DEVICES["h100"].rates("bfloat16").flops  # 2 forward, 2 again, 4 backward
    assert floor < seconds().products < 1.4 * floor  # and attention, and the head


def test_doubling_the_devices_halves_the_time_of_products():
    one, two = seconds((1, 4, 1), rows=2), seconds((1, 8, 1), rows=1)
    assert two.products == pytest.approx(one.products / 2) and two.memory < one.memory


@pytest.mark.slow
def test_a_tensor_mesh_needs_more_time_per_row_than_fsdp():
    split, shared = seconds((1, 8, 1)), seconds((1, 1, 8))
    assert shared.total < split.total < 8 * shared.total  # it does an eighth of the tokens
    assert shared.products == pytest.approx(split.products / 8)


@pytest.mark.slow
def test_float32_products_take_twice_the_time():
    assert seconds(dtype="float32").products == pytest.approx(2 * seconds().products)


def test_a_reference_costs_a_forward_pass():
    plain, with_ref = seconds(), seconds(loss=LossConfig(kl_coef=0.1))
    assert 1.1 * plain.total < with_ref.total < 1.5 * plain.total


def test_scores_pass_through_memory_unless_a_kernel_keeps_them_on_the_chip():
    def memory(form: str, row_tokens: int) -> float:
        return seconds(row_tokens=row_tokens, model=PolicyConfig(dtype="bfloat16", attention=form)).memory

    assert memory("scanned", 16384) > 2.2 * memory("scanned", 8192)
    assert memory("kernel", 16384) < 2 * memory("kernel", 8192)


def test_adapters_save_weight_gradients_optimizer_traffic_and_collectives():
    full, adapted = seconds(), seconds(lora=LoraConfig(rank=16))
    assert 0.7 * full.products < adapted.products < 0.8 * full.products  # 6 of 8 for each parameter and token
    assert adapted.collectives < 0.75 * full.collectives and adapted.memory < full.memory
    plain = needed(planned())
    assert 0.6 * plain < needed(planned(lora=LoraConfig(rank=16))) < 0.75 * plain  # 4 of 6


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize(("kl_coef", "updates"), [(0.0, 1), (0.1, 1), (0.1, 2)])
def test_the_vision_tower_has_the_traffic_of_the_passes_that_the_learner_makes(trained, kl_coef, updates):
    """A frozen tower encodes before old log-probs and before the gradients; a trained one for each pass of scores."""
    sections = {"loss": LossConfig(kl_coef=kl_coef), "optim": OptimConfig(train_vision=trained)}
    train = TrainConfig(prompts_per_step=4, group_size=2, updates_per_step=updates)
    run = planned(row_tokens=1024, train=train, **sections)
    share = share_of(run.update, run.model, run.largest_batch(), "gpu")
    num_scores = (kl_coef > 0) + (updates > 1)
    encoded, flops = works(run).get("encode_vision"), batch_flops(run.update, run.model, share.batch, "gpu")
    passes = num_scores if trained else 1 + (updates > 1)
    one_pass = frame_flops(run.model, share.batch.row_patches) * share.batch.num_frame_rows
    assert (encoded.memory_bytes if encoded else 0) == passes * vision_bytes(share)
    assert (8 * encoded.flops if encoded else 0) == pytest.approx(passes * one_pass)
    assert flops.get("update, vision", 0) == passes * one_pass
    assert flops.get("update, trained vision", 0) == 4 * trained * one_pass  # forward, again, and twice as much back
    scored, forward = works(run).get("score"), flops["update, forward and backward"] / 3
    assert (scored.memory_bytes if scored else 0) == num_scores * forward_bytes(share)
    assert (8 * scored.flops if scored else 0) == pytest.approx(num_scores * forward)


@pytest.mark.parametrize(
    ("form", "remat", "products"),
    [
        *(("xla", "none", 6), ("blocked", "none", 7), ("scanned", "none", 7), ("kernel", "none", 9)),
        *(("xla", "dots", 8), ("blocked", "dots", 7), ("xla", "attention", 8), ("blocked", "attention", 7)),
        *(("blocked", "full", 9), ("kernel", "full", 11)),
    ],
)
def test_the_products_of_an_update_by_hand(form, remat, products):
    """Attention has two products forward, four backward and one again for the scores; the kernel has two more.

    If the layers' products are repeated, a layer's last one is not, because only the next layer needs its result.
    """
    run = planned(model=PolicyConfig(remat=remat, attention=form))
    shape = replace(run.largest_batch(), row_actions=256)
    flops = batch_flops(run.update, EIGHT_B, shape, "gpu")
    pairs = 8 * 32 * 36 * row_pairs(form, EIGHT_B, 8192, "gpu")
    weights = 6 * layer_params(EIGHT_B) * 8 * 8192 + 8 * TABLE * 8 * 256  # logits are computed twice
    if remat in ("attention", "full"):
        weights += 2 * (layer_params(EIGHT_B) - 36 * 4096 * 12288) * 8 * 8192
    update = flops["update, forward and backward"] + flops["update, recomputation"]
    assert update == pytest.approx(weights + products * 2 * 128 * pairs)


LAYERS, TABLE, VISION = 6_945_767_424, 151_936 * 4096, 576_388_336  # values of the 8B, without norms
TRAINED = LAYERS + 2 * TABLE
HIDDEN = 8192 * 4096  # values of a row
SCORED = {"loss": LossConfig(kl_coef=0.1)}
SENT = {  # mesh and sections: kind, values in bfloat16, devices and hosts of each collective by program
    "fsdp": (
        (1, 8, 1),
        SCORED,
        {
            "score": [("all-gather", LAYERS + TABLE, 8, 1), ("all-to-all", HIDDEN, 8, 1)],
            "gradients": [
                ("all-gather", 2 * (LAYERS + TABLE), 8, 1),  # a forward pass, and one backward with recomputation
                ("reduce-scatter", LAYERS + 2 * TABLE, 8, 1),  # the head's in float32
                ("all-to-all", 2 * HIDDEN, 8, 1),
            ],
        },
    ),
    "tensor": (
        (1, 1, 8),
        SCORED,
        {
            "score": [("all-reduce", 73 * HIDDEN, 8, 1)],
            "gradients": [("all-reduce", (36 * 2 * 3 + 2) * HIDDEN, 8, 1)],
        },
    ),
    "no recomputation": (
        (1, 1, 8),
        {"model": PolicyConfig(remat="none")},
        {"gradients": [("all-reduce", (36 * 2 * 2 + 2) * HIDDEN, 8, 1)]},
    ),
    "two hosts": (
        (2, 4, 2),
        {},
        {
            "gradients": [
                ("all-gather", LAYERS + TABLE, 4, 1),
                ("reduce-scatter", LAYERS // 2 + TABLE, 4, 1),
                ("all-to-all", 2 * HIDDEN, 4, 1),
                ("all-reduce", 218 * HIDDEN, 2, 1),
                ("all-reduce", TRAINED // 8, 2, 2),
            ]
        },
    ),
    "four hosts": (
        (1, 4, 8),
        {},
        {
            "gradients": [
                ("all-gather", 2 * (LAYERS + TABLE) // 8, 4, 4),
                ("reduce-scatter", (LAYERS + 2 * TABLE) // 8, 4, 4),
                ("all-to-all", 2 * HIDDEN, 4, 4),
                ("all-reduce", 218 * HIDDEN, 8, 1),
            ]
        },
    ),
    "vision": (
        (1, 8, 1),
        {"optim": OptimConfig(train_vision=True)},
        {
            "gradients": [
                ("all-gather", 2 * (LAYERS + VISION + TABLE), 8, 1),
                ("reduce-scatter", LAYERS + VISION + 2 * TABLE, 8, 1),
                ("all-to-all", 2 * HIDDEN, 8, 1),
            ]
        },
    ),
    "adapters": (
        (1, 8, 1),
        {"lora": LoraConfig(rank=64)},
        {
            "encode_vision": [("all-gather", VISION, 8, 1)],
            "gradients": [
                ("all-gather", 2 * (LAYERS + TABLE), 8, 1),
                ("reduce-scatter", 36 * 64 * (2 * 8192 + 2 * 5120 + 3 * 16384), 8, 1),
                ("all-to-all", HIDDEN, 8, 1),
            ],
        },
    ),
}


@pytest.mark.parametrize("case", SENT)
def test_a_devices_programs_send_weights_gradients_and_activations(case):
    shape, sections, expected = SENT[case]
    run = planned(shape, **sections)
    for name, collectives in expected.items():
        sent = [each for each in works(run)[name].collectives if each.num_bytes]
        for each, (kind, values, devices, hosts) in zip(sent, collectives, strict=True):
            assert each == Collective(kind, pytest.approx(2 * values, rel=0.002), devices, hosts), name


def test_memory_traffic_by_hand():
    """Weights in float32 and twice in bfloat16 per pass, activations, scores, logits, and gradients."""

    def share(mesh=(1, 8, 1), attention="kernel", remat="full", train_vision=False, **sizes) -> Share:
        policy = PolicyConfig(dtype="bfloat16", attention=attention, remat=remat)
        shape = BatchShape(**{"num_rows": 8, "row_actions": 256, "num_frame_rows": 64, **sizes}, **SIZES)
        run = planned(mesh, model=policy, optim=OptimConfig(train_vision=train_vision))
        return share_of(run.update, EIGHT_B, shape, "gpu")

    def both(**sizes) -> np.ndarray:
        return np.array([forward_bytes(share(**sizes)), update_bytes(share(**sizes))])

    SIZES = {"row_tokens": 8192, "row_patches": 196, "num_parts": 8}
    hidden = 256 * 4096 * 2  # read again for each block of the head
    one, logits = both(), 256 * 151_936 * 4 * LOGIT_PASSES + hidden + 2 * TABLE
    forward, update = both(num_rows=16) - one
    activations = forward - (logits - 2 * TABLE)
    assert update == pytest.approx(3.5 * activations + 3 * (logits - 2 * TABLE))  # 2 forward, 2 again, 3 backward
    assert one[0] == pytest.approx(LAYERS * (4 / 8 + 2 * 2) + activations + logits, rel=0.001)
    gathered = both(mesh=(1, 4, 1), num_rows=4) - one
    assert gathered == pytest.approx([LAYERS / 2, 3 * LAYERS / 2 + GRADIENT_BYTES * TRAINED / 8], rel=0.001)
    passes = SCORE_BYTES["forward"], 2 * SCORE_BYTES["forward"] + SCORE_BYTES["backward"]
    for mesh, rows in (((1, 8, 1), 1), ((1, 4, 2), 2)):  # a row, or half the heads and values of two rows
        plain, logits = both(mesh=mesh), 256 * 151_936 * 4 * LOGIT_PASSES + 3 * rows * hidden
        assert both(mesh=mesh, row_actions=512) - plain == pytest.approx([logits, 3 * logits])
        for form in ("xla", "blocked", "scanned"):
            pairs = row_pairs(form, EIGHT_B, 8192, "gpu") * 32 * 36
            scores = both(mesh=mesh, attention=form) - plain
            assert scores == pytest.approx([num_bytes * pairs for num_bytes in passes], rel=0.02)
    assert one[1] - update_bytes(share(remat="none")) == pytest.approx(
        LAYERS * (4 / 8 + 2 * 2) + activations, rel=0.001
    )
    once, twice = (vision_bytes(share(num_frame_rows=number)) for number in (64, 128))
    assert 2 * once - twice == pytest.approx(VISION * (4 / 8 + 2 * 2), rel=0.001)
    for mesh, tensor in (((1, 8, 1), 1), ((1, 4, 2), 2)):
        few, many = (vision_bytes(share(mesh, num_frame_rows=number)) for number in (64, 128))
        patches, saved = 64 * 196 * tensor / 8, vision_residuals(EIGHT_B, share(remat="none").compute, tensor)
        pairs = patches * 196 * 16 * 27 / tensor
        assert many - few == pytest.approx(2 * 27 * saved.layer_token * patches + SCORE_BYTES["forward"] * pairs)
    trained = update_bytes(share(train_vision=True)) - one[1] - GRADIENT_BYTES * VISION / 8
    assert 3 * once < trained < 4 * once  # a pass, its recomputation, and a backward pass of one and a half


@pytest.mark.parametrize(("kl_coef", "trained"), [(0.0, False), (0.1, True)])
def test_the_flops_that_the_mathematics_requires_by_hand(kl_coef, trained):
    """Without recomputation and padding: scores of a causal row, and logits of the scored tokens of two batches."""
    update = planned(loss=LossConfig(kl_coef=kl_coef), optim=OptimConfig(train_vision=trained)).update
    step = Step(BatchShape(8, 8192, 196, 8, 256, 64), num_batches=2, num_updates=1, num_tokens=100_000)
    scores = 4 * 36 * 32 * 128 * 2 * 8 * 8192 * 8193 / 2
    forward = 2 * layer_params(EIGHT_B) * 100_000 + 2 * TABLE * 2 * 8 * 256 + scores
    vision = (3 if trained else 1) * 2 * 64 * frame_flops(EIGHT_B, 196)
    assert needed_flops(update, EIGHT_B, step) == pytest.approx((4 if kl_coef else 3) * forward + vision)


def test_dots_repeats_the_products_of_experts():
    dims, again = preset("30b-a3b"), []
    for remat in ("none", "dots"):
        run = planned(dims=dims, model=PolicyConfig(remat=remat, attention="blocked"))
        again.append(batch_flops(run.update, dims, run.largest_batch(), "gpu")["update, recomputation"])
    rows = 8 * expert_rows(dims.text, 8192)  # of eight parts
    assert again[1] - again[0] == pytest.approx(48 * rows * 2 * 3 * 2048 * 768)


def test_the_optimizer_moves_32_bytes_per_parameter_of_the_device():
    split = works(planned((2, 4, 1), row_tokens=1024))["apply_gradients"].memory_bytes / 32
    assert 8_190_735_360 / 4 <= split < 1.001 * 8_190_735_360 / 4  # norms are whole everywhere


@pytest.mark.parametrize(
    ("num_devices", "stride", "num_hosts"),
    [(8, 1, 1), (4, 2, 1), (8, 8, 8), (64, 1, 8), (2, 32, 2), (16, 2, 4), (12, 1, 2)],
)
def test_the_devices_of_a_mesh_axis_span_hosts_of_eight(num_devices, stride, num_hosts):
    assert among("all-gather", 1, num_devices, stride, 8).num_hosts == num_hosts


@pytest.mark.slow
def test_one_device_has_no_communication():
    programs = works(planned((1, 1, 1), row_tokens=1024, dims=tiny_config()))
    assert sum(work.sent_bytes for work in programs.values()) == 0


@pytest.mark.slow
def test_fsdp_sends_weights_and_tensor_sends_activations():
    def sent(shape, row_tokens):
        return works(planned(shape, row_tokens=row_tokens))["gradients"].sent_bytes

    assert sent((1, 8, 1), 16384) == pytest.approx(sent((1, 8, 1), 8192), rel=0.01)  # and rows of the embedding
    assert sent((1, 1, 8), 16384) == pytest.approx(2 * sent((1, 1, 8), 8192))


def test_the_mathematics_requires_fewer_flops_than_are_computed():
    computed = 8 * sum(work.flops for work in works(planned()).values())
    assert 0.6 * computed < needed(planned()) < 0.8 * computed  # 6 of 8, and half of the scores


def test_a_cold_start_has_full_rows_and_no_reference():
    run = PlannedSft.of(SftConfig(data=DataConfig(train="traces.jsonl"), pack=PackConfig(8192, 2)), EIGHT_B)
    step = run.typical_step()
    assert (step.num_batches, step.num_tokens) == (4, 8 * 8192)
    assert "score" not in works(run) and step.shape == run.largest_batch()
