"""A response is accepted only if an SGLang server with this run's weights could have sent it."""

import base64
from dataclasses import replace

import numpy as np
import pytest
from fake_server import good_answer

from rollout.engine.answers import Expected, generation_of
from rollout.engine.http import ServerUnavailable
from rollout.engine.protocol import Generation, Sampling
from rollout.engine.settings import Mixture, SGLangSettings

IDS = [5, 6, 7, 99]  # with a stop token
SETTINGS = SGLangSettings(vocab_size=1000)
WITH_EXPERTS = replace(SETTINGS, mixture=Mixture(2, 8, 2))
EXPERTS = np.arange(6 * 2 * 2, dtype=np.int32).reshape(6, 2, 2) % 8  # 3 + 4 - 1 tokens


def read(answer: object, oldest: int = 0, newest: int = 0, settings: SGLangSettings = SETTINGS) -> Generation:
    return generation_of(answer, Sampling(4, stop_ids=(99,)), Expected("t/", oldest, newest), settings, "http://a", 0.0)


def spans(*spans: tuple[str, int, int]) -> list[dict[str, object]]:
    return [dict(zip(("version", "start", "end"), span, strict=True)) for span in spans]


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (good_answer(IDS, output_token_logprobs=[[-0.5, 5, None]]), "its ids differ from the ids of its log-probs"),
        (good_answer(IDS, logp=float("nan")), "the log-prob nan, expected a finite number"),
        (good_answer(IDS, logp=500.0), "a log-prob is above 0"),
        (good_answer(IDS, logp="-1"), "a log-prob is not a number"),
        (good_answer(IDS, weight_versions=None), "invalid answer"),
        (good_answer(IDS, "t/7"), "sampled with the weights t/7, and t/0 was published"),
        (good_answer(IDS, "other/0"), "sampled with the weights other/0"),
        (good_answer(IDS, "0"), "sampled with the weights 0"),
        (good_answer(IDS, weight_versions=spans((0, 0, 4))), "0 is not a label of weights"),
        (good_answer(IDS, weight_versions=spans(("t/0", 0, 1), ("t/0", 2, 4))), "spans have gaps or overlap"),
        (good_answer(IDS, weight_versions=spans(("t/0", 0, 9))), "spans have gaps or overlap"),
        (good_answer(IDS, weight_versions=spans(("t/0", 0, 4), ("t/0", 1, 4))), "spans have gaps or overlap"),
        (good_answer(IDS, weight_versions=spans(("t/0", 0, 3))), "some tokens have no policy version"),
        (good_answer([]), "it has no token and finish reason 'length'"),
        (good_answer(IDS * 3), "12 tokens, at most 4 requested"),
        *((good_answer([id_, 6]), "an id is negative or larger than any vocabulary") for id_ in (-5, 2**31)),
        (good_answer([1000, 6]), "an id is beyond the vocabulary of 1000"),
        *((good_answer([id_, 6]), "an id is not an integer") for id_ in (5.5, True)),
        (good_answer([99, 6]), "it sampled on after a stop token"),
        (good_answer(IDS, prompt_tokens=10**12), "1000000000000 is not a number of tokens"),
        (good_answer(IDS, cached_tokens=-1), "-1 is not a number of tokens"),
        (good_answer(IDS, finish_reason=None), "invalid answer"),
        ({"output_ids": IDS}, "invalid answer"),
        (None, "invalid answer"),
    ],
)
def test_an_invalid_response_is_a_server_failure(answer, problem):
    with pytest.raises(ServerUnavailable, match=problem):
        read(answer)


@pytest.mark.parametrize(
    ("ids", "logp", "problem"),
    [
        ([-1, 6], [-0.5, -0.5], "the id -1, but ids start at 0"),
        ([5, 6], [-0.5, float("nan")], "the log-prob nan, expected a finite number of at most 0"),
        ([5, 6], [float("-inf"), 0], "the log-prob -inf"),
        ([5, 6], [0, 0.7], r"the log-prob 0\.7"),  # a probability
        ([5, 6], [0], "2 ids came with 1 log-probs"),
    ],
)
def test_an_invalid_reply_of_any_engine_is_named(ids, logp, problem):
    with pytest.raises(ValueError, match=problem):
        Generation(np.array(ids, np.int32), np.array(logp, np.float32), np.zeros(len(ids), np.int32), "stop")


@pytest.mark.parametrize(
    ("labels", "versions"),
    [
        (["t/3", "t/?u", "t/3", "t/4"], [3, 3, 3, 4]),
        (["t/?u", "t/3", "t/3", "t/?u"], "new weights came"),  # may be of version 4
        (["t/4", "t/?u", "t/4", "t/?u"], [4, 4, 4, 4]),
        (["t/3", "t/?u", "t/?v", "t/4"], "new weights came"),
        (["t/?u", "t/?u", "t/?u", "t/?u"], "new weights came"),
        (["t/4", "t/4", "t/3", "t/3"], "sampled with the weights t/3, and t/4 was published"),
        (["t/2", "t/2", "t/3", "t/3"], "sampled with the weights t/2"),  # published before it was sent
        (["t/3", "t/3", "t/3", "u/3"], "sampled with the weights u/3"),
        (["t/3", "t/3", "t/3", "default"], "sampled with the weights default"),
        (["t/3", "t/3", "t/3", "t/"], "sampled with the weights t/, and"),  # claimed but not yet published
    ],
)
def test_every_token_has_the_version_of_its_label(labels, versions):
    answer = good_answer(IDS, weight_versions=spans(*((label, n, n + 1) for n, label in enumerate(labels))))
    if isinstance(versions, list):
        assert read(answer, 3, 4).versions.tolist() == versions
    else:
        with pytest.raises(ServerUnavailable, match=versions):
            read(answer, 3, 4)


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        (EXPERTS, EXPERTS),
        (None, None),  # a server without the flag
        (EXPERTS[1:], "experts for 5 tokens, expected 6"),
        *((EXPERTS + change, "an expert index is out of range") for change in (-1, 1)),
        (EXPERTS[:, :, :1][:5], "invalid answer"),
    ],
)
def test_a_response_has_the_experts_of_all_tokens_except_the_last(experts, found):
    meta = {} if experts is None else {"routed_experts": base64.b64encode(experts.tobytes()).decode()}
    answer = good_answer(IDS, **meta)
    if isinstance(found, str):
        with pytest.raises(ServerUnavailable, match=found):
            read(answer, settings=WITH_EXPERTS)
    else:
        np.testing.assert_array_equal(read(answer, settings=WITH_EXPERTS).experts, found)
