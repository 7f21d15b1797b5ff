"""Seconds from what a device has to do: by hand where hands suffice, by what must follow otherwise."""

from dataclasses import replace

import pytest

from model_port.config import LoraConfig, preset
from model_port.tiny import tiny_config
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import DataConfig, PackConfig, PolicyConfig, SftConfig
from paravt_jax.learner.settings import LossConfig
from paravt_jax.plan.collectives import Collective, among
from paravt_jax.plan.devices import DEVICES, Rates
from paravt_jax.plan.roofline import ProgramWork, StepSeconds, batch_works, step_seconds
from paravt_jax.plan.update import update_of
from paravt_jax.plan.workload import Step, full_step, largest_batch, layer_params, needed_flops, typical_step

RATES = Rates(flops=100.0, memory_bytes=10.0, link_bytes=5.0)


def seconds(shape=(1, 8, 1), *, rows=1, row_tokens=8192, size="8b", dtype="bfloat16", **sections) -> StepSeconds:
    config = config_of(shape, rows=rows, row_tokens=row_tokens, dtype=dtype, **sections)
    model, device = preset(size), DEVICES["h100"]
    step = full_step(largest_batch(config, model))
    return step_seconds(batch_works(update_of(config), model, step.shape, "gpu"), step, device.rates(dtype))


def test_flops_memory_and_collectives_follow_each_other():
    work = ProgramWork(flops=300.0, memory_bytes=20.0, collectives=(Collective("all-gather", 40, 2),))
    assert work.seconds(RATES) == StepSeconds(3.0, 2.0, 4.0) and work.seconds(RATES).total == 9.0


def test_a_step_has_its_batches_and_its_updates():
    works = {"add_gradients": ProgramWork(300.0, 20.0, ()), "apply_gradients": ProgramWork(0.0, 50.0, ())}
    step = Step(largest_batch(config_of((1, 1, 1), rows=1, row_tokens=64), tiny_config()), 7, 3, 11)
    assert step_seconds(works, step, RATES) == StepSeconds(7 * 3.0, 7 * 2.0 + 3 * 5.0, 0.0)


def test_longer_rows_take_longer_and_more_for_each_token():
    short, middle, long = (seconds(row_tokens=tokens).total for tokens in (8192, 16384, 32768))
    assert 2 * short < middle and 2 * middle < long


def test_flops_of_8b_are_eight_for_each_parameter_and_token():
    parameters, tokens = layer_params(preset("8b")), 8 * 8192
    floor = 8 * parameters * tokens / 8 / DEVICES["h100"].rates("bfloat16").flops  # 2 forward, 2 again, 4 backward
    assert floor < seconds().products < 1.4 * floor  # and attention, and the head


def test_the_same_rows_on_twice_the_devices_take_half_the_products():
    one, two = seconds((1, 4, 1), rows=2), seconds((1, 8, 1), rows=1)
    assert two.products == pytest.approx(one.products / 2) and two.memory < one.memory


def test_a_mesh_that_shares_its_rows_is_not_faster_for_having_fewer():
    split, shared = seconds((1, 8, 1)), seconds((1, 1, 8))
    assert shared.total < split.total < 8 * shared.total  # it does an eighth of the tokens


def test_float32_has_seconds_too():
    assert seconds(dtype="float32").products == pytest.approx(2 * seconds().products)


def test_a_reference_costs_a_forward_pass():
    plain, with_ref = seconds(), seconds(loss=LossConfig(kl_coef=0.1))
    assert 1.1 * plain.total < with_ref.total < 1.5 * plain.total


def test_scores_of_a_row_go_through_memory_unless_a_kernel_keeps_them():
    def memory(form: str, row_tokens: int) -> float:
        return seconds(row_tokens=row_tokens, model=PolicyConfig(dtype="bfloat16", attention=form)).memory

    assert memory("scanned", 16384) > 2.2 * memory("scanned", 8192)
    assert memory("kernel", 16384) < 2 * memory("kernel", 8192)


def test_adapters_save_gradients_of_weights_the_optimizer_and_what_fsdp_scatters():
    full, adapted = seconds(), seconds(lora=LoraConfig(rank=16))
    assert 0.7 * full.products < adapted.products < 0.8 * full.products  # 6 of 8 for each parameter and token
    assert adapted.collectives < 0.75 * full.collectives and adapted.memory < full.memory
    config = config_of((1, 8, 1), rows=1, row_tokens=8192, lora=LoraConfig(rank=16))
    step = full_step(largest_batch(config, preset("8b")))
    plain = needed_flops(update_of(replace(config, lora=LoraConfig())), preset("8b"), step)
    assert 0.6 * plain < needed_flops(update_of(config), preset("8b"), step) < 0.75 * plain  # 4 of 6


def test_the_optimizer_moves_32_bytes_of_every_parameter_that_a_device_has():
    config = config_of((2, 4, 1), rows=1, row_tokens=1024)
    works = batch_works(update_of(config), preset("8b"), largest_batch(config, preset("8b")), "gpu")
    split = works["apply_gradients"].memory_bytes / 32
    assert 8_190_735_360 / 4 <= split < 1.001 * 8_190_735_360 / 4  # norms are whole everywhere


@pytest.mark.parametrize(
    ("num_devices", "stride", "num_hosts"), [(8, 1, 1), (4, 2, 1), (8, 8, 8), (64, 1, 8), (2, 32, 2), (16, 2, 4)]
)
def test_devices_of_a_mesh_axis_are_in_as_many_boxes_as_they_reach_over(num_devices, stride, num_hosts):
    assert among("all-gather", 1, num_devices, stride).num_hosts == num_hosts


def test_one_device_sends_nothing():
    config = config_of((1, 1, 1), rows=1, row_tokens=1024)
    works = batch_works(update_of(config), tiny_config(), largest_batch(config, tiny_config()), "cpu")
    assert sum(work.sent_bytes for work in works.values()) == 0


def test_fsdp_sends_weights_tensor_sends_activations():
    def sent(shape, row_tokens):
        config = config_of(shape, rows=1, row_tokens=row_tokens, dtype="bfloat16")
        works = batch_works(update_of(config), preset("8b"), largest_batch(config, preset("8b")), "gpu")
        return works["add_gradients"].sent_bytes

    assert sent((1, 8, 1), 16384) == pytest.approx(sent((1, 8, 1), 8192), rel=0.01)  # and rows of the embedding
    assert sent((1, 1, 8), 16384) == pytest.approx(2 * sent((1, 1, 8), 8192))


def test_what_the_mathematics_needs_is_less_than_what_is_computed():
    config = config_of((1, 8, 1), rows=1, row_tokens=8192, dtype="bfloat16")
    step = full_step(largest_batch(config, preset("8b")))
    computed = 8 * sum(work.flops for work in batch_works(update_of(config), preset("8b"), step.shape, "gpu").values())
    assert (
        0.6 * computed < needed_flops(update_of(config), preset("8b"), step) < 0.8 * computed
    )  # 6 of 8, and half of the scores


def test_imitation_has_full_rows_and_no_reference():
    config = SftConfig(data=DataConfig(train="traces.jsonl"), pack=PackConfig(8192, 2))
    step = typical_step(config, preset("8b"))
    assert (step.num_batches, step.num_tokens) == (4, 8 * 8192)
    assert "score" not in batch_works(update_of(config), preset("8b"), step.shape, "gpu")
    assert replace(step.shape, num_rows=2) == largest_batch(config, preset("8b"))
