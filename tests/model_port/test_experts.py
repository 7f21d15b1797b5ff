"""Experts equal a loop over tokens for any routing and any split of rows."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import model_port
from model_port import experts, one_sequence
from model_port.experts import block_shape, mix, route, tokens_of_experts
from model_port.inputs import NOT_REPLAYED
from model_port.tiny import make_tiny, tiny_config

NUM_EXPERTS, TOKENS, WIDTH, FFN = 5, 37, 7, 3


def by_hand(x, weights, chosen, gate_up, down):
    out = np.zeros_like(x)
    for token, (row, experts_, shares) in enumerate(zip(x, chosen, weights, strict=True)):
        for expert, share in zip(experts_, shares, strict=True):
            gate, up = np.einsum("d,dcf->cf", row, gate_up[expert])
            out[token] += share * (gate / (1 + np.exp(-gate)) * up) @ down[expert]
    return out


CHOICES = {
    "even": lambda random: np.stack([random.permutation(NUM_EXPERTS)[:2] for _ in range(TOKENS)]),
    "all tokens to two": lambda random: np.tile([4, 1], (TOKENS, 1)),
    "one": lambda random: random.integers(0, NUM_EXPERTS, (TOKENS, 1)),
    "all": lambda random: np.stack([random.permutation(NUM_EXPERTS) for _ in range(TOKENS)]),
}


@pytest.mark.slow
@pytest.mark.parametrize("few_tokens", [0, 256], ids=["several blocks an expert", "one block an expert"])
def test_experts_compute_what_a_loop_over_tokens_computes(few_tokens, monkeypatch):
    monkeypatch.setattr(experts, "FEW_TOKENS", few_tokens)
    random = np.random.default_rng(3)
    x, gate_up, down = (
        random.standard_normal(shape).astype(np.float32)
        for shape in ((TOKENS, WIDTH), (NUM_EXPERTS, WIDTH, 2, FFN), (NUM_EXPERTS, FFN, WIDTH))
    )
    mixed = jax.jit(lambda *inputs: mix(*inputs))  # a new function object is traced again
    for name, choose in CHOICES.items():
        chosen = choose(random)
        weights = random.random(chosen.shape).astype(np.float32)
        assert (block_shape(TOKENS, NUM_EXPERTS, chosen.shape[1])[0] > NUM_EXPERTS) == (few_tokens == 0)
        rows = (array.reshape(1, TOKENS, -1) for array in (x, weights, chosen))
        (out,) = mixed(*map(jnp.asarray, (*rows, gate_up, down)))
        expected = by_hand(x, weights, chosen, gate_up, down)
        np.testing.assert_allclose(out[0], expected, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "token_experts", "expected"),
    [
        (16_384, 128, 8, (384, 512)),  # 131072 pairs in 256 blocks, plus each expert's partial block
        (32, 128, 8, (128, 32)),  # one block per expert
        (2000, 8, 1, (23, 128)),  # 15 whole blocks of 128, and 8
    ],
)
def test_blocks_have_room_for_any_routing(num_tokens, num_experts, token_experts, expected):
    num_blocks, rows = block_shape(num_tokens, num_experts, token_experts)
    assert (num_blocks, rows) == expected


def test_a_replayed_token_uses_the_given_experts_with_router_probabilities():
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.1, 0.1], [0.5, 0.3, 0.1, 0.1]]]))
    weights, chosen = route(logits, 2, jnp.array([[[3, 0], [NOT_REPLAYED, NOT_REPLAYED]]]))
    np.testing.assert_array_equal(chosen[0], [[3, 0], [0, 1]])
    np.testing.assert_allclose(weights[0], [[1 / 6, 5 / 6], [0.625, 0.375]], rtol=1e-6)  # 0.5 and 0.3 of 0.8


@pytest.mark.slow
def test_a_model_replays_the_experts_of_its_tokens(tmp_path):
    """The router has no preference, so every token goes to experts 0 and 1 with equal weights."""
    make_tiny(tmp_path / "hf", config=tiny_config("qwen3_vl_moe"))
    model, num_tokens = model_port.load(tmp_path / "hf"), 9
    router = model.text.layers.mlp.router_kernel_xm
    router.set_value(0 * router.get_value())
    text, _ = one_sequence(model.config, np.arange(5, 5 + num_tokens))
    plain = model_port.logits(model, np.arange(5, 5 + num_tokens))

    def replayed(experts: list[int], first: int = 0) -> np.ndarray:
        chosen = np.array(text.experts)
        chosen[0, first:num_tokens] = experts
        return np.asarray(model(replace(text, experts=jnp.asarray(chosen))))[0, :num_tokens]

    assert (text.experts == NOT_REPLAYED).all()
    np.testing.assert_array_equal(replayed([1, 0]), replayed([0, 1]))
    np.testing.assert_allclose(replayed([0, 1]), plain, atol=1e-6)
    late = replayed([4, 2], first=5)
    np.testing.assert_allclose(late[:5], plain[:5], atol=1e-6)
    assert (np.abs(late[5:] - plain[5:]).max(axis=1) > 1e-3).all()


def test_padding_does_not_count_as_load():
    chosen = jnp.array([[[[0, 2], [0, 1], [3, 0]]]])  # one layer and one row of three tokens; the last token is padding
    np.testing.assert_array_equal(tokens_of_experts(chosen, jnp.array([[1, 2, 0]]), 4), [[2, 1, 1, 0]])
