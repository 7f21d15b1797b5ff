"""Parts of the planned memory by hand. test_plan.py compares the whole with real arrays and the compiler."""

import pytest

from model_port.config import LoraConfig, preset
from paravt_jax.bench.mesh_case import config_of
from paravt_jax.config import MeshConfig, PolicyConfig
from paravt_jax.learner.packing import BatchShape
from paravt_jax.learner.settings import LossConfig, OptimConfig
from paravt_jax.plan.memory import Memory, SamplerShape, Share, memory_of, sampled_adapter_values, share_of
from paravt_jax.plan.run import PlannedRl
from paravt_jax.plan.workload import adapter_params

EIGHT_B = preset("8b")
TEXT, TABLE = 8_190_735_360, 151_936 * 4096


def share(mesh=(1, 1, 1), platform="gpu", **sections) -> Share:
    config = config_of(mesh, rows=1, row_tokens=8192, dtype="bfloat16", **sections)
    run = PlannedRl.of(config, EIGHT_B)
    return share_of(run.update, EIGHT_B, run.largest_batch(), platform)


def test_the_peak_is_the_largest_phase_beside_the_resident_memory():
    assert Memory({"a": 1, "b": 10}, {"one": {"c": 100, "d": 1000}, "other": {"c": 500}}, {}).peak_bytes == 1111


def test_the_copy_for_sampling_joins_adapters_of_the_same_input_on_gpus():
    """There each B of queries, keys and values is one of three diagonal blocks, and of the MLP's inputs one of two."""
    on_gpu, on_tpu = (sampled_adapter_values(EIGHT_B, 64, 1, platform) for platform in ("gpu", "tpu"))
    assert on_tpu == adapter_params(64, EIGHT_B)
    assert on_gpu - on_tpu == 36 * 64 * (2 * (4096 + 1024 + 1024) + 12288 + 12288)


@pytest.mark.parametrize(
    ("attention", "platform", "values"),
    [
        ("xla", "gpu", 8192**2),
        ("kernel", "gpu", 8192 * 128),
        ("blocked", "tpu", 8192**2 / 2),  # and the rest of the blocks on the diagonal
        ("blocked", "gpu", 8192**2),
    ],
)
def test_scores_of_a_form_take_float32_for_every_head(attention, platform, values):
    for mesh, heads in (((1, 1, 1), 32), ((1, 1, 4), 8)):
        policy = PolicyConfig(dtype="bfloat16", attention=attention)
        num_bytes = share(mesh, platform, model=policy).score_bytes(3, 8192)
        assert num_bytes == pytest.approx(3 * heads * 4 * values, rel=0.1)


def test_offloaded_moments_and_reference_are_on_the_device_only_for_the_optimizer():
    offloaded = share(optim=OptimConfig(offload=True), loss=LossConfig(kl_coef=0.1))
    assert offloaded.resident(None).keys() == {"masters, float32", "frozen vision tower, float32"}
    assert share(loss=LossConfig(kl_coef=0.1)).resident(None)["reference"] == 2 * TEXT
    shape = BatchShape(1, 128, 4, 1, 8, 1)
    phases = memory_of(offloaded.update, EIGHT_B, shape, None, "gpu").phases
    assert [name for name, parts in phases.items() if "Adam moments, float32" in parts] == ["optimizer"]


def test_a_batch_has_gradients_and_gathered_weights():
    for mesh, parts in (((1, 1, 1), 1), ((1, 8, 1), 8)):
        head, backward = share(mesh).head(), share(mesh).backward()
        num_blocks = share(mesh).batch.row_actions / 256
        assert head["a block of the head and its gradient"] == pytest.approx((2 + 4) * TABLE / num_blocks, rel=0.1)
        assert head["logits of a block"] == pytest.approx(2 * 4 * 256 * 151_936, rel=0.1)
        assert backward["gradients of the batch"] == pytest.approx(4 * TEXT / parts, rel=0.001)
        assert share(mesh).layer()["a layer's weights, gathered"] == pytest.approx(
            2 * (TEXT - 2 * TABLE) / 36, rel=0.001
        )
    blocks = [share(lora=LoraConfig(rank=rank)).head()["a block of the head and its gradient"] for rank in (0, 64)]
    assert blocks[0] == 3 * blocks[1]  # a frozen head has no gradient


@pytest.mark.parametrize("beside_update", [True, False])
def test_each_phase_has_the_arrays_that_are_alive_in_it(beside_update):
    own, sampler = share(), SamplerShape(8, 32_768, MeshConfig(), beside_update)
    memory = memory_of(own.update, EIGHT_B, own.batch, sampler, "gpu")
    cache, sampling = {"key/value cache", "encoded frames"}, own.sampling(sampler).keys()
    backward, learning = ["backward pass, a layer", "backward pass, the head"], ["frames", "optimizer"]

    def phases_with(*names: str) -> list[str]:
        return [phase for phase, parts in memory.phases.items() if parts.keys() >= {*names}]

    assert phases_with(*sampling) == [*(backward + learning if beside_update else []), "rollout"]
    assert phases_with("gradients of the step") == backward + learning
    assert phases_with("batch") == [*backward, "frames"]
    assert phases_with("gradients of the batch", "saved by the forward pass") == backward
    assert phases_with("attention scores") + phases_with("logits of a block") == backward
    assert phases_with("next copy for sampling") == ["publish"] * beside_update
    assert phases_with("copy for sampling") == ["rollout"] * (not beside_update)
    assert memory.phases["optimizer"]["gradients of the step"] == 4 * TEXT
    assert ("copy for sampling" in memory.resident) == beside_update and cache <= memory.resident.keys()
    assert memory.engine.keys() == (cache | {"copy for sampling"} | sampling if beside_update else cache)
