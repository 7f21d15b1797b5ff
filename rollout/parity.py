"""Statistics of the parity gate: how far a server's log-probs are from the learner's.

Rounding errors depend on the model: on the width of its logits, its depth, and how its layers amplify errors. So no
bound is in nats. From the weights that the servers have, the learner scores every token in float32 and in bfloat16. The
difference is this token's bfloat16 noise, and a server may be a fixed multiple of the noise away from float32.
Distances are compared by their quantiles and by their KL.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from rollout.picture import Picture

KINDS = ("sampled", "dialogue", "after_image", "structural")
SHOWN = "after_response_image"  # tokens after a picture in a tool's response

# A server's allowed distance from the learner's float32, as a multiple of the learner's bfloat16 noise. Measured for
# correct servers: 0.9 to 1.5 in bfloat16, and 1e-4 in float32, whose rounding is 2^-16 of bfloat16's and accumulates in
# sums. Measured for wrong ones: 40 for a doubled rope_theta, 10 for swapped pictures, 4 for a layer that is off by 3 %.
TIMES_NOISE = {"bfloat16": 3.0, "float32": 2.0**-10}
QUANTILES = {"half within": 0.5, "90 % within": 0.9, "99 % within": 0.99}
# Statistics of few tokens are noisy on both sides: with n tokens beyond a quantile, or n that dominate a mean, the
# bound is 1 + FEW / √n times as large. A quantile with fewer than MIN_BEYOND is too close to the maximum to compare.
FEW, MIN_BEYOND = 2.0, 5
# Above it the model is unfit for bfloat16, or the learner's bfloat16 is wrong, so the noise cannot judge a server.
MAX_NOISE_KL = 0.03
# Measured: 0.01 for correct servers in bfloat16, because rounding cancels, and 0.36 to 1.1 for wrong pictures.
MAX_PART_OF_WRONG = 0.15
TINY = 1e-30  # avoids division by zero
FLOOR = 1e-5  # nats; float32 still rounds where bfloat16 gives a log-prob of exactly 0


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    ids: np.ndarray  # int32, one placeholder per picture
    pictures: tuple[Picture, ...]
    temperature: float | int = 1.0


@dataclass(frozen=True, eq=False)
class Scored:
    """The learner's log-probs, computed from the weights that servers have."""

    ids: np.ndarray  # int32, expanded
    logp: np.ndarray  # computed in float32; index t is the log-prob of token t, the first has none
    bfloat16_logp: np.ndarray  # computed in bfloat16

    def offsets(self, logp: np.ndarray, where: Any = slice(None)) -> np.ndarray:
        """The learner's float32 log-probs minus the server's, and minus the learner's bfloat16 ones."""
        return self.logp[where] - np.stack([logp, self.bfloat16_logp[where]])


class Scorer(Protocol):
    """The learner's side: `paravt_jax.sampling.score.LearnerScorer`."""

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]: ...


@dataclass(frozen=True)
class Statistic:
    """One statistic of the distances from the learner's float32."""

    name: str
    server: float
    noise: float  # the learner's own, in bfloat16
    allowed: float

    @property
    def problem(self) -> str:
        if self.server <= self.allowed:
            return ""
        return f"{self.name} {self.server:.3g}, the limit is {self.allowed:.3g}"


@dataclass
class Difference:
    """Distances of the log-probs of some tokens."""

    times_noise: float
    sampled: bool = False  # True: the server sampled the tokens, so they estimate its KL from the learner
    offsets: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))  # of the server, of the noise

    def add(self, offsets: np.ndarray) -> None:
        self.offsets = np.concatenate([self.offsets, offsets], axis=1)

    @property
    def num_tokens(self) -> int:
        return self.offsets.shape[1]

    @property
    def kl(self) -> Statistic:
        """KL(server‖learner in float32) per token, by Schulman's k3. A KL is quadratic, so its bound is squared."""
        terms = k3(self.offsets)
        server, noise = terms.mean(axis=1).tolist()
        shares = terms[1] / max(terms[1].sum(), TINY)
        num_decisive = 1 / max(float(np.square(shares).sum()), TINY)
        return Statistic("KL", server, noise, max(self._times(num_decisive) ** 2 * noise, float(k3(FLOOR))))

    @property
    def statistics(self) -> list[Statistic]:
        if not self.num_tokens:
            return []
        beyond = {name: (1 - part) * self.num_tokens for name, part in QUANTILES.items()}
        quantiles = [self._quantile(name, num) for name, num in beyond.items() if num >= MIN_BEYOND]
        return [self.kl, *quantiles] if self.sampled else quantiles

    def _quantile(self, name: str, num_beyond: float) -> Statistic:
        server, noise = np.quantile(np.abs(self.offsets), QUANTILES[name], axis=1).tolist()
        return Statistic(name, server, noise, max(self._times(num_beyond) * noise, FLOOR))

    def _times(self, num_decisive: float) -> float:
        return self.times_noise * (1 + FEW / num_decisive**0.5)


@dataclass
class ShownDifference(Difference):
    """Few tokens follow a picture of a response, so that rounding hides a wrong one in their quantiles.

    The learner also scores them with a wrong picture. This change has a direction, along which the rounding errors of
    tokens cancel, and those of another picture do not.
    """

    offsets: np.ndarray = field(default_factory=lambda: np.zeros((3, 0)))  # the third: of the learner's wrong picture

    @property
    def statistics(self) -> list[Statistic]:
        if not self.num_tokens:
            return []
        *_, noise, wrong = self.offsets
        size = max(float(wrong @ wrong), TINY)
        server, own = (self.offsets[:2] @ wrong / size).tolist()
        rounding = self.times_noise * float(np.linalg.norm(noise * wrong)) / size
        return [Statistic("part of a wrong picture's change", server, own, MAX_PART_OF_WRONG + rounding)]


def k3(offsets: Any) -> Any:
    return np.expm1(offsets) - offsets


@dataclass
class Parity:
    """The comparison with one server, by kind of token."""

    url: str
    dtype: str
    differences: dict[str, Difference] = field(init=False)
    wrong_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in TIMES_NOISE:
            raise ValueError(
                f"{self.url} computes in {self.dtype}, but the gate supports {' and '.join(TIMES_NOISE)}; restart it "
                f"in one of them"
            )
        times_noise = TIMES_NOISE[self.dtype]
        self.differences = {kind: Difference(times_noise, kind == "sampled") for kind in KINDS}
        self.differences[SHOWN] = ShownDifference(times_noise)

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
    times = " or ".join(f"{TIMES_NOISE[dtype]:.3g} ({dtype})" for dtype in dtypes)
    lines += ["", f"Allowed: {times} times the learner's own, squared for the KL, and more with few tokens."]
    return "\n".join(lines)
