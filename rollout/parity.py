"""Statistics of the parity gate: how far a server's log-probs are from the learner's.

Rounding errors depend on the model: on the scale of its logits, its depth, and how its layers amplify errors. That is
why no bound is in nats. The learner scores every token in float32 and in bfloat16, with the servers' weights. The
difference is this token's bfloat16 noise. A server's distance from the float32 log-probs may be a fixed multiple of the
noise. The gate compares quantiles of the distances and their KL.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout.picture import Picture

KINDS = ("sampled", "dialogue", "after_image", "structural")
SHOWN = "after_response_image"  # tokens after a picture in a tool's response

# A server's allowed distance from the learner's float32, as a multiple of the learner's bfloat16 noise. Measured for
# correct servers: 0.7 to 1.4 in bfloat16, and 1e-4 in float32, whose rounding is 2^-16 of bfloat16's and accumulates in
# sums. Measured for wrong servers: 44 for a doubled rope_theta, 10 for swapped pictures, 5 for a layer off by 3 %.
NOISE_FACTOR = {"bfloat16": 3.0, "float32": 2.0**-10}
QUANTILES = {"half within": 0.5, "90 % within": 0.9, "99 % within": 0.99}
# Statistics of few tokens are noisy, for the server and the learner alike. If n tokens are beyond a quantile, or
# dominate a mean, the bound is larger by the factor 1 + SMALL_SAMPLE / √n. A quantile with fewer than MIN_BEYOND tokens
# beyond it is too close to the maximum to compare.
SMALL_SAMPLE, MIN_BEYOND = 2.0, 5
# If the noise has a larger KL, the model does not work in bfloat16, or the learner's bfloat16 is wrong. Then the noise
# says nothing about a server.
MAX_NOISE_KL = 0.03
# The allowed fraction of the change that a wrong picture causes (ResponsePictureDifference). Measured: 0.01 for correct
# servers in bfloat16, because rounding errors cancel, and 0.36 to 1.1 for wrong pictures.
MAX_WRONG_PICTURE_FRAC = 0.15
TINY = 1e-30  # avoids division by zero
FLOOR = 1e-5  # nats; float32 still has rounding errors where bfloat16 gives a log-prob of exactly 0


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    ids: np.ndarray  # int32, one placeholder per picture
    pictures: tuple[Picture, ...]
    temperature: float | int = 1.0


@dataclass(frozen=True, eq=False)
class Scored:
    """The learner's log-probs of a request, computed with the servers' weights."""

    ids: np.ndarray  # int32, expanded
    logp: np.ndarray  # computed in float32; index t is the log-prob of token t; index 0 has no meaning
    bfloat16_logp: np.ndarray  # computed in bfloat16

    def offsets(self, logp: np.ndarray, where: Any = slice(None)) -> np.ndarray:
        """Subtracts the server's log-probs, and the learner's bfloat16 log-probs, from the learner's float32 ones."""
        return self.logp[where] - np.stack([logp, self.bfloat16_logp[where]])


class Scorer(Protocol):
    """Computes the learner's log-probs, for example `paravt_jax.sampling.score.LearnerScorer`."""

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]: ...


@dataclass(frozen=True)
class Statistic:
    """A statistic of distances from the learner's float32 log-probs."""

    name: str
    server: float  # of the server's distances
    noise: float  # of the distances of the learner's own bfloat16
    allowed: float  # bound for `server`

    @property
    def problem(self) -> str:
        if self.server <= self.allowed:
            return ""
        return f"{self.name} {self.server:.3g}, the limit is {self.allowed:.3g}"


@dataclass
class Difference:
    """The distances of some tokens' log-probs from the learner's float32."""

    noise_factor: float
    sampled: bool = False  # True if the server sampled the tokens, so that they estimate its KL from the learner
    offsets: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))  # rows: the server's, the bfloat16 noise

    def add(self, offsets: np.ndarray) -> None:
        self.offsets = np.concatenate([self.offsets, offsets], axis=1)

    @property
    def num_tokens(self) -> int:
        return self.offsets.shape[1]

    @property
    def kl(self) -> Statistic:
        """KL(server‖learner in float32) per token, by Schulman's k3 estimator.

        A KL grows with the square of the distances, so the factor in its bound is squared.
        """
        terms = k3(self.offsets)
        server, noise = terms.mean(axis=1).tolist()
        shares = terms[1] / max(terms[1].sum(), TINY)
        num_decisive = 1 / max(float(np.square(shares).sum()), TINY)
        return Statistic("KL", server, noise, max(self._factor(num_decisive) ** 2 * noise, float(k3(FLOOR))))

    @property
    def statistics(self) -> list[Statistic]:
        if not self.num_tokens:
            return []
        beyond = {name: (1 - part) * self.num_tokens for name, part in QUANTILES.items()}
        quantiles = [self._quantile(name, num) for name, num in beyond.items() if num >= MIN_BEYOND]
        return [self.kl, *quantiles] if self.sampled else quantiles

    def _quantile(self, name: str, num_beyond: float) -> Statistic:
        server, noise = np.quantile(np.abs(self.offsets), QUANTILES[name], axis=1).tolist()
        return Statistic(name, server, noise, max(self._factor(num_beyond) * noise, FLOOR))

    def _factor(self, num_decisive: float) -> float:
        return self.noise_factor * (1 + SMALL_SAMPLE / num_decisive**0.5)


@dataclass
class ResponsePictureDifference(Difference):
    """Distances of the tokens after a picture in a tool's response, compared with the effect of a wrong picture.

    These tokens are few, so rounding errors would hide a wrong picture in their quantiles. The learner therefore also
    scores them with a wrong picture. The server's offsets are projected on this change of the log-probs: rounding
    errors cancel in the projection, but the effect of a wrong picture does not.
    """

    offsets: np.ndarray = field(default_factory=lambda: np.zeros((3, 0)))  # third row: the wrong picture's change

    @property
    def statistics(self) -> list[Statistic]:
        if not self.num_tokens:
            return []
        *_, noise, wrong = self.offsets
        size = max(float(wrong @ wrong), TINY)
        server, own = (self.offsets[:2] @ wrong / size).tolist()
        rounding = self.noise_factor * float(np.linalg.norm(noise * wrong)) / size
        return [Statistic("part of a wrong picture's change", server, own, MAX_WRONG_PICTURE_FRAC + rounding)]


def k3(offsets: Any) -> Any:
    """Schulman's k3, an estimator of a KL from differences of log-probs (http://joschu.net/blog/kl-approx.html)."""
    return np.expm1(offsets) - offsets


@dataclass
class Parity:
    """The comparison of a server with the learner, by kind of token."""

    url: str
    dtype: str
    differences: dict[str, Difference] = field(init=False)
    wrong_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in NOISE_FACTOR:
            raise ValueError(
                f"{self.url} computes in {self.dtype}, but the gate supports {' and '.join(NOISE_FACTOR)}; restart the "
                f"server with one of these types"
            )
        noise_factor = NOISE_FACTOR[self.dtype]
        self.differences = {kind: Difference(noise_factor, kind == "sampled") for kind in KINDS}
        self.differences[SHOWN] = ResponsePictureDifference(noise_factor)

    def add(self, kind: str, offsets: np.ndarray) -> None:
        self.differences[kind].add(offsets)

    @property
    def problems(self) -> list[str]:
        problems = list(self.wrong_ids)
        for kind, difference in self.differences.items():
            if difference.num_tokens == 0:
                problems.append(f"no token was compared for {kind!r}")
            elif beyond := [statistic.problem for statistic in difference.statistics if statistic.problem]:
                problems.append(
                    f"log-probs of {kind!r} tokens differ from the learner's in float32: {'; '.join(beyond)}"
                )
        sampled = self.differences["sampled"]
        if self.dtype == "bfloat16" and sampled.num_tokens and not sampled.kl.noise <= MAX_NOISE_KL:
            problems.append(
                f"the learner's own bfloat16 has a KL of {sampled.kl.noise:.3g}, more than {MAX_NOISE_KL}, so no "
                f"server can be judged; use float32 for this model, in the learner and the servers"
            )
        return problems

    def to_record(self) -> dict[str, Any]:
        differences = {
            kind: {"num_tokens": difference.num_tokens, "compared": [asdict(s) for s in difference.statistics]}
            for kind, difference in self.differences.items()
        }
        return {"url": self.url, "dtype": self.dtype, "differences": differences, "problems": self.problems}


def table(parities: Sequence[Parity]) -> str:
    heads = ["server", "computes in", "tokens", "compared", "differences from the learner in float32"]
    heads += ["the server's", "the learner's own in bfloat16", "allowed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for parity in parities:
        for kind, difference in parity.differences.items():
            tokens = f"| {parity.url} | {parity.dtype} | {kind} | {difference.num_tokens} |"
            for statistic in difference.statistics:
                numbers = (statistic.server, statistic.noise, statistic.allowed)
                lines.append(f"{tokens} {statistic.name} | {' | '.join(f'{number:.2e}' for number in numbers)} |")
    dtypes = dict.fromkeys(parity.dtype for parity in parities)
    times = " or ".join(f"{NOISE_FACTOR[dtype]:.3g} ({dtype})" for dtype in dtypes)
    lines += ["", f"Allowed: {times} times the learner's own, squared for the KL, and more with few tokens."]
    return "\n".join(lines)
