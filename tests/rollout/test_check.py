"""The parity gate accepts correct servers for logits of any width, and rejects wrong servers.

transformers simulates the server, so that its programs and roundings differ from the learner's.
"""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from async_tests import async_test
from fake_server import FakeServer
from on_use import torch, transformers
from torch_server import TorchServer
from wide_model import make_wide, with_layer_of, write_weights

import model_port
from model_port.adapters import add_adapter, new_adapter
from model_port.config import LoraConfig
from model_port.layers import Compute
from model_port.processing import VisionContract
from model_port.sharding import make_mesh
from paravt_jax.sampling import score
from paravt_jax.sampling.score import LearnerScorer
from rollout import check as gate
from rollout.chat import Chat
from rollout.check import check
from rollout.engine.answers import PROBE_TEXT, Fingerprint
from rollout.parity import KINDS, SHOWN, Difference, Parity, ResponsePictureDifference, Scored, ScoreRequest, table

DTYPES = ("bfloat16", "float32")
NIGHTLY_FLOAT32 = pytest.param("float32", marks=pytest.mark.nightly)  # bfloat16 noise hides faults more easily
NEW_TOKENS = 24


class OneSize(LearnerScorer):
    def settled(self, sizes_px):
        return super().settled(sizes_px)[2:3]  # square, and large enough for a frame to have many tokens


@pytest.fixture(scope="module")
def right(tmp_path_factory) -> Path:
    return make_wide(tmp_path_factory.mktemp("wide") / "right")


@pytest.fixture(scope="module")
def chat(right):
    return Chat.from_hf(right)


@pytest.fixture(scope="module")
def scorers(right):
    """Scorers by dtype; all dialogues share one length bucket, so that each scorer compiles once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(score, "TOKEN_BUCKET", 1024)
        patched.setattr(gate, "NEW_TOKENS", NEW_TOKENS)
        contract = VisionContract.from_hf(right)
        yield {dtype: OneSize(model_port.load(right, dtype), contract) for dtype in DTYPES}


def judged(scorers, chat, dtype, model, *change, num_episodes=1) -> Parity:
    async def body():
        async with TorchServer(model, dtype, *change) as server:
            return await check([server.url], scorers[dtype], chat, num_episodes=num_episodes)

    (found,) = asyncio.run(body())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", NIGHTLY_FLOAT32])
def test_a_correct_server_is_accepted_with_realistic_logits(dtype, scorers, chat, right):
    found = judged(scorers, chat, dtype, right, num_episodes=5)
    assert found.problems == []
    dialogue = found.differences["dialogue"]
    assert found.differences["sampled"].num_tokens >= 4 * NEW_TOKENS
    if dtype == "bfloat16":  # larger than any absolute bound in nats that rejects wrong tiny models
        assert np.abs(dialogue.offsets[0]).mean() > 0.04
    else:  # a tenth of what is allowed
        assert all(one.server < one.allowed / 4 for one in dialogue.statistics)
    (shown,) = found.differences[SHOWN].statistics
    assert abs(shown.server) < shown.allowed / 2


@async_test
async def test_a_context_without_room_for_the_dialogue_names_the_setting(chat):
    message = r"has a context of 256 tokens, and the parity gate needs \d{3}; raise rollout\.max_context_tokens"
    async with FakeServer() as server:
        with pytest.raises(ValueError, match=message):
            await gate._run_episodes(server.url, (64, 96), chat, 1, {"context_length": 256})


def another_layer(right: Path, wrong: Path) -> None:
    model, other = model_port.load(right), model_port.load(make_wide(wrong.with_name("other"), seed=1))
    write_weights(with_layer_of(model, other), wrong, "float32")


def another_rope(right: Path, wrong: Path) -> None:
    config = json.loads((wrong / "config.json").read_text())
    (config["text_config"].get("rope_parameters") or config["text_config"])["rope_theta"] *= 2
    (wrong / "config.json").write_text(json.dumps(config))


def another_template(ids, pictures):
    """Replaces the line break after each role name by another token."""
    return [ids[1] if before == ids[0] else token for before, token in zip([0, 0, *ids], ids, strict=False)], pictures


def shifted(ids, pictures):
    """Prepends a token, as servers that add a BOS token do."""
    return [ids[1], *ids], pictures


def in_another_order(ids, pictures):
    return ids, [pictures[1], pictures[0], *pictures[2:]]


WRONG = {
    "one layer's weights": another_layer,
    "rope": another_rope,
    "template": another_template,
    "shift": shifted,
    "order of pictures": in_another_order,
}
NIGHTLY_WRONG = ("one layer's weights", "template")


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [pytest.param(n, marks=[pytest.mark.nightly] * (n in NIGHTLY_WRONG)) for n in WRONG])
@pytest.mark.parametrize("dtype", ["bfloat16", NIGHTLY_FLOAT32])
def test_a_wrong_server_is_rejected(wrong, dtype, scorers, chat, right, tmp_path):
    change = WRONG[wrong]
    if change in (another_layer, another_rope):
        model = shutil.copytree(right, tmp_path / "wrong")
        change(right, model)
        found = judged(scorers, chat, dtype, model)
    else:
        found = judged(scorers, chat, dtype, right, change)
    assert any("log-probs of 'dialogue' tokens differ from the learner's in float32" in one for one in found.problems)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["first", pytest.param("black", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("dtype", ["bfloat16", NIGHTLY_FLOAT32])
def test_a_server_with_a_wrong_picture_in_a_tool_response_is_rejected(wrong, dtype, scorers, chat, right):
    def change(ids, pictures):
        return ids, [*pictures[:-1], pictures[0] if wrong == "first" else 0 * pictures[-1]]

    found = judged(scorers, chat, dtype, right, change)
    assert any("'after_response_image' tokens differ" in one for one in found.problems)
    (statistic,) = found.differences[SHOWN].statistics
    assert statistic.server > 2 * statistic.allowed


def test_the_command_needs_an_episode_and_a_model(tiny_hf, tmp_path, monkeypatch):
    for arguments, message in (
        (["--model", str(tiny_hf), "--episodes", "0"], "^--episodes 0 must be at least 1$"),
        (["--model", str(tmp_path)], f"^{tmp_path} has no config.json, so it is not a Hugging Face model directory$"),
    ):
        monkeypatch.setattr(sys, "argv", ["gate", "--url", "http://127.0.0.1:9", *arguments])
        with pytest.raises(ValueError, match=message):
            score.main()


@pytest.mark.slow
@async_test
async def test_the_command_reports_differences_and_fails_at_wrong_servers(right, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gate, "NEW_TOKENS", 8)
    monkeypatch.setattr(score, "TOKEN_BUCKET", 1024)  # so that it compiles once
    monkeypatch.setattr(score, "LearnerScorer", OneSize)
    out = tmp_path / "gate.json"
    command = ["gate", "--model", str(right), "--episodes", "1", "--json", str(out)]
    async with TorchServer(right, "float32") as server, TorchServer(right, "float32", shifted) as shifting:
        url, wrong = server.url, shifting.url
        monkeypatch.setattr(sys, "argv", [*command, "--url", f"{url}/"])
        await asyncio.to_thread(score.main)
        assert f"| {url} | float32 | dialogue |" in capsys.readouterr().out
        (parity,) = json.loads(out.read_text())
        assert (parity["url"], parity["problems"]) == (url, [])
        monkeypatch.setattr(sys, "argv", [*command, "--url", url, "--url", wrong])
        with pytest.raises(RuntimeError, match=f"^the servers and the learner disagree: {wrong}: ") as caught:
            await asyncio.to_thread(score.main)
    assert f"{url}: " not in str(caught.value) and f"| {wrong} | float32 |" in capsys.readouterr().out
    assert [bool(parity["problems"]) for parity in json.loads(out.read_text())] == [False, True]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda chat, ids: np.append(ids, chat.image_id), "resizes pictures"),
        (lambda chat, ids: chat.encode(chat.decode(ids)), "re-encodes the text"),
    ],
)
def test_changed_ids_are_explained_by_resizing_or_retokenization(tiny_hf, change, problem):
    chat, parity = Chat.from_hf(tiny_hf), Parity("http://a", "float32")
    ids = np.concatenate([[chat.image_id], *map(chat.encode, gate.FIRST_TURN)])
    logp, other = np.zeros(len(ids), np.float32), change(chat, ids)
    gate._compare_dialogue(parity, other, np.zeros(len(other)), Scored(ids, logp, logp), chat, (32, 64))
    (message,) = parity.wrong_ids
    assert f"has {len(other)} ids on http://a, but {len(ids)} different ids in" in message
    assert f"the server {problem}; start it with" in message


def test_the_picture_effect_by_hand():
    difference = ResponsePictureDifference(3.0)
    difference.add(np.array([[0.0, 1.0], [0.0, 0.5], [3.0, 4.0]]))
    (part,) = difference.statistics
    assert (part.server, part.noise) == (4 / 25, 2 / 25)
    assert part.allowed == pytest.approx(0.15 + 3 * 2 / 25)  # rounding noise of the second token


def test_one_outlier_does_not_reject_a_server():
    random = np.random.default_rng(0)
    offsets = 0.02 * random.standard_normal((2, 1000))
    offsets[0, 17] = 0.5
    difference = Difference(3.0, sampled=True)
    difference.add(offsets)
    assert [one.name for one in difference.statistics] == ["KL", "half within", "90 % within", "99 % within"]
    assert not any(one.problem for one in difference.statistics)
    difference.offsets[0] *= 6
    assert all(one.problem for one in difference.statistics)


def test_the_kl_by_hand_and_its_bound_is_the_square_of_the_others():
    difference = Difference(3.0, sampled=True)
    difference.add(np.log([[2.0, 0.5], [1.0, 2.0]]))
    # k3(x) = e^x - 1 - x: of log 2 it is 1 - log 2, of log 1/2 it is log 2 - 1/2, of 0 it is 0
    assert difference.kl.server == pytest.approx(0.5 / 2)
    assert difference.kl.noise == pytest.approx((1 - np.log(2)) / 2)
    # a single token determines the noise, so that the bound is 3 (1 + 2 / √1) times as large
    assert difference.kl.allowed == pytest.approx(81 * difference.kl.noise)
    difference.add(np.full((2, 10_000), 0.5))
    assert difference.kl.allowed == pytest.approx(9 * (1 + 2 / 100) ** 2 * difference.kl.noise, rel=1e-3)


def test_quantiles_of_few_tokens_have_wider_bounds_or_none():
    difference = Difference(3.0)
    difference.add(np.ones((2, 60)))
    assert [one.name for one in difference.statistics] == ["half within", "90 % within"]
    # 30 and 6 tokens are beyond the quantiles
    expected = [3 * (1 + 2 / 30**0.5), 3 * (1 + 2 / 6**0.5)]
    assert [one.allowed for one in difference.statistics] == pytest.approx(expected)


def add_to_all(parity, server, noise):
    for kind in KINDS:
        parity.add(kind, np.stack([server, noise]))
    parity.add(SHOWN, np.stack([server, noise, np.full(len(server), 10.0)]))


def test_nan_values_reject_a_server():
    parity = Parity("a", "bfloat16")
    add_to_all(parity, np.full(40, 0.01), np.full(40, 0.01))
    assert parity.problems == []
    parity.differences["dialogue"].offsets[0] = np.nan
    assert len(parity.problems) == 1 and "half within nan, the limit is 0.0434" in parity.problems[0]


def test_log_probs_that_round_to_zero_in_bfloat16_are_allowed():
    parity = Parity("a", "float32")
    add_to_all(parity, np.full(40, 3e-7), np.zeros(40))
    assert parity.problems == []


def test_an_inaccurate_learner_judges_no_server():
    parity = Parity("a", "bfloat16")
    add_to_all(parity, np.full(40, 0.5), np.full(40, 0.5))
    assert ["the learner's own bfloat16 has a KL of 0.149" in one for one in parity.problems] == [True]


def test_the_table_has_measurements_noise_and_bounds():
    parity = Parity("http://a", "bfloat16")
    parity.add("dialogue", np.stack([np.full(36, 0.02), np.full(36, 0.01)]))
    head, _, row, _, words = table([parity]).splitlines()
    assert "the server's | the learner's own in bfloat16 | allowed |" in head
    assert row == "| http://a | bfloat16 | dialogue | 36 | half within | 2.00e-02 | 1.00e-02 | 4.41e-02 |"
    assert "3 (bfloat16) times the learner's own" in words


@pytest.mark.nightly
def test_weights_rounded_for_servers_add_no_noise(right, chat):
    """The learner has float32 masters, but the gate computes from their bfloat16 copies, which servers get."""
    contract = VisionContract.from_hf(right)
    request = ScoreRequest(chat.encode("The patch is red. The event is green."), ())

    def scored(dtype: str, mesh=None) -> Scored:
        model = model_port.load(right, dtype, mesh)
        model.compute = Compute("bfloat16")
        return LearnerScorer(model, contract, mesh).score([request])[0]

    rounded = scored("bfloat16")
    for masters in (scored("float32"), scored("float32", make_mesh(1, 2, 1))):
        np.testing.assert_allclose(masters.logp, rounded.logp, atol=1e-4)
    unrounded = LearnerScorer(model_port.load(right), contract).score([request])[0]
    assert np.abs(unrounded.logp - rounded.logp).mean() > 100 * np.abs(masters.logp - rounded.logp).mean()


@pytest.mark.nightly
def test_a_server_with_a_merged_adapter_is_accepted(right, chat, scorers, tmp_path):
    """The learner applies the adapter separately; the server has it merged into bfloat16 weights, rounded again."""
    model, lora = model_port.load(right, "bfloat16"), LoraConfig(rank=4, alpha=8.0)
    random = np.random.default_rng(0)
    pairs = {
        path: array if array.any() else 0.01 * random.standard_normal(array.shape, np.float32)
        for path, array in new_adapter(model.config, lora, seed=0).items()
    }
    add_adapter(model, lora, pairs)
    served = shutil.copytree(right, tmp_path / "served")
    write_weights(model, served, "bfloat16")
    with_adapter = {"bfloat16": OneSize(model, VisionContract.from_hf(right))}
    assert judged(with_adapter, chat, "bfloat16", served, num_episodes=3).problems == []
    assert judged(scorers, chat, "bfloat16", served).problems != []  # without the adapter the models differ


def fingerprint(model: Path, chat: Chat, attention: str) -> Fingerprint:
    """Returns the fingerprint that a bfloat16 server would send."""
    settings = dict(dtype=torch.bfloat16, attn_implementation=attention)
    policy = transformers.Qwen3VLForConditionalGeneration.from_pretrained(model, **settings)
    ids = torch.tensor(chat.encode(PROBE_TEXT))[None]
    with torch.no_grad():
        logp = torch.log_softmax(policy.eval()(input_ids=ids).logits[0, :-1].float(), -1)
    return Fingerprint(ids[0].numpy(), logp.gather(1, ids[0, 1:, None])[:, 0].numpy())


@pytest.mark.slow
def test_fingerprints_match_between_correct_bfloat16_servers_only(right, chat, tmp_path):
    expected, found = fingerprint(right, chat, "sdpa"), fingerprint(right, chat, "eager")
    assert np.abs(found.logp - expected.logp).mean() > 0.05  # only the summation order differs
    assert found.problem(expected) == ""
    wrong = shutil.copytree(right, tmp_path / "wrong")
    another_rope(right, wrong)
    for model in (wrong, make_wide(tmp_path / "other", seed=1)):
        problem = fingerprint(model, chat, "sdpa").problem(expected)
        assert "half of its log-probs of the same text differ by more than" in problem
