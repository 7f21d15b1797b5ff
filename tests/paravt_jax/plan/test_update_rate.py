"""Trained tokens per second and device, and MFU, by hand."""

import pytest

from model_port.config import preset
from paravt_jax.config import Config, SftConfig, load_config
from paravt_jax.plan.run import PlannedRl, PlannedSft
from paravt_jax.plan.workload import decoded_bytes

# Layers of the 8B: queries and output 2·4096·4096, keys and values 2·4096·1024, a SwiGLU of 3·4096·12288.
LAYERS_OF_8B = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
EXPERT, ACTIVE_OF_30B = 3 * 2048 * 768, 8  # parameters of an expert; experts of a token


def run_of(*settings: str, size: str = "8b") -> PlannedRl:
    config = load_config(None, "mesh.fsdp=4", "pack.num_rows=4", *settings, schema=Config)
    return PlannedRl.of(config, preset(size))


@pytest.mark.parametrize(
    ("settings", "flops_per_param"),
    [
        (["loss.kl_coef=0"], 6),
        (["loss.kl_coef=0.01"], 8),  # and the reference's log-probs
        (["loss.kl_coef=0.01", "train.updates_per_step=2"], 10),  # and the old log-probs
        (["loss.kl_coef=0", "lora.rank=8"], 4),  # frozen weights have no gradients
    ],
)
def test_the_rates_of_an_update_by_hand(settings, flops_per_param):
    """480,000 tokens in 24 s on four H200."""
    assert run_of(*settings).update_rates(480_000, 24.0, "NVIDIA H200") == {
        "perf/trained_tokens_per_s_device": 5000.0,
        "perf/mfu": pytest.approx(5000 * flops_per_param * LAYERS_OF_8B / 989e12),
    }


def test_only_the_experts_of_a_token_count():
    """48 layers: 32 heads and 4 of keys of 128 values, a router of 128 experts."""
    layer = 2 * (32 + 4) * 128 * 2048 + 128 * 2048
    run = run_of("loss.kl_coef=0", size="30b-a3b")
    assert run.trained_token_flops == 6 * 48 * (layer + ACTIVE_OF_30B * EXPERT)
    assert decoded_bytes(run.model) == 2 * (48 * (layer + 128 * EXPERT) + 151_936 * 2048)  # many rows need them all


def test_a_cold_start_has_no_log_probs_of_another_policy():
    run = PlannedSft.of(load_config(None, schema=SftConfig), preset("8b"))
    assert run.trained_token_flops == 6 * LAYERS_OF_8B


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 PCIe"])
def test_devices_without_a_data_sheet_have_no_mfu(kind):
    assert run_of().update_rates(480_000, 24.0, kind) == {"perf/trained_tokens_per_s_device": 5000.0}


def test_a_step_without_an_update_has_no_rates():
    assert run_of().update_rates(0, 0.1, "NVIDIA H200") == {}
