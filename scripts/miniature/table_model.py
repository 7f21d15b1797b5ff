"""Predicts the map without a network: each token that matters is a biased coin, rewarded and credited by `paravt_jax`.

python -m scripts.miniature.table_model     predicts the map, as docs/miniature/data/map_predictions.json

An episode has a few decisions (open and close the thinking, call, close the call, close the answer), each a coin that
PARA-GRPO trains. Rewards, advantages and the tokens that receive them come from `paravt_jax`. Nothing is fitted:
the coins start as the world's dials, sharpened by the temperature.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from model_port.cli import add_debug_flag, prog_of, run_cli
from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.config import Config, load_config
from paravt_jax.learner.advantages import GroupRewards, group_advantages, group_rewards
from paravt_jax.learner.credit import property_mask, struct_mask
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import RewardTerms, reward_terms, with_needed_calls
from rollout.chat import Chat
from rollout.ledger import Ledger, Segment
from rollout.prompter import Task
from rollout.records import Episode, Turn
from scripts.miniature.arms import CONFIGS, settings_of
from scripts.miniature.cells import BUDGETS, CELLS, COLD_START, METRICS, PREDICTIONS, Cell, write_rows_of_map
from scripts.miniature.dials import World
from scripts.miniature.traces import overview_shows
from scripts.miniature.world import CURATED_FRAC

CALL = '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 8, "end_time": 16}}'
RIGHT_SEEN, RIGHT_UNSEEN = 0.95, 0.25  # accuracy without a report: four colors, and four times in a window
STEPS, LEARNING_RATE, SEEDS = 60, 0.08, 8
EVALUATED = 200  # episodes for each number of frames

Coin = tuple[str, bool]  # name, and whether it came up heads


class Scored(NamedTuple):
    """An episode's rewards, and which of its coins each part of the advantage credits."""

    terms: RewardTerms
    f_tau: float  # the format reward of the published settings
    structural: np.ndarray  # one value per coin
    properties: Mapping[str, np.ndarray]


class Sample(NamedTuple):
    coins: tuple[Coin, ...]
    scored: Scored

    @property
    def metrics(self) -> tuple[float, float, float, float]:
        terms = self.scored.terms
        return terms.accuracy or 0.0, float(terms.num_calls > 0), self.scored.f_tau, float(terms.parseable)


@cache
def scored(coins: tuple[Coin, ...], right: bool, reward: RewardConfig) -> Scored:
    """Scores an episode; `coins` are open, close_think, call, close_call and close_answer, in this order."""
    texts, at = _written(coins, "B" if right else "C")
    outcomes = ["ok" if side else "invalid" for name, side in coins if name == "close_call"]
    terms = reward_terms(texts, outcomes, "B", "mcq", reward)
    f_tau = reward_terms(texts, outcomes, "B", "mcq").format
    return Scored(terms, f_tau, *_masks(texts, terms, at))


def _written(coins: Sequence[Coin], answer: str) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the turns' texts, and the turn and character of each coin's token."""
    queue, at = list(coins), []
    texts = [""]

    def write(name: str, text: str) -> bool:
        at.append((len(texts) - 1, len(texts[-1])))
        assert queue[0][0] == name
        _, side = queue.pop(0)
        texts[-1] += text if side else ""
        return side

    def think() -> None:
        if queue[0][0] == "open":
            opened = write("open", "<think>\n")
        else:
            opened, texts[-1] = True, "<think>\n"  # forced
        texts[-1] += "I look at the frames.\n"
        if opened:
            write("close_think", "</think>\n")

    think()
    if write("call", f"<tool_call>\n{CALL}\n"):
        write("close_call", "</tool_call>")
        texts.append("")
        think()
    texts[-1] += f"<answer>{answer}"
    write("close_answer", "</answer>")
    return texts, at


def _masks(
    texts: Sequence[str], terms: RewardTerms, at: Sequence[tuple[int, int]]
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Returns which coins are structural tokens, and which belong to each property."""
    chat, episode = _chat(), Episode("", Task("", "", ("video.mp4",), 1), Ledger())
    ids = [np.append(chat.encode(text), chat.turn_end_id) for text in texts]
    starts = np.cumsum([0, *map(len, ids)]).tolist()
    for text, span, own in zip(texts, pairwise(starts), ids, strict=True):
        episode.turns.append(Turn(text, "stop", span))
        episode.ledger.segments.append(Segment("sampled", own, (), np.zeros(len(own), np.float32), 0))
    tokens = [
        starts[turn] + next(n for n, (_, end) in enumerate(chat.spans(ids[turn])) if end > character)
        for turn, character in at
    ]
    structural = struct_mask(episode, terms.tags, chat)
    properties = {each.name: property_mask(episode, each, structural, chat)[tokens] for each in terms.anchors}
    return structural[tokens], properties


@cache
def _chat() -> Chat:
    return Chat(tiny_tokenizer(), CHAT_TEMPLATE)


@dataclass
class Policy:
    """Logits of the coins, trained by Adam."""

    logits: dict[str, float]
    mean: dict[str, float] = field(default_factory=dict)
    square: dict[str, float] = field(default_factory=dict)
    step: int = 0

    def heads(self, coin: str) -> float:
        return 1 / (1 + np.exp(-self.logits[coin]))

    def update(self, gradient: Mapping[str, float]) -> None:
        self.step += 1
        for coin, value in gradient.items():
            self.mean[coin] = 0.9 * self.mean.get(coin, 0.0) + 0.1 * value
            self.square[coin] = 0.99 * self.square.get(coin, 0.0) + 0.01 * value**2
            mean, square = self.mean[coin] / (1 - 0.9**self.step), self.square[coin] / (1 - 0.99**self.step)
            self.logits[coin] += LEARNING_RATE * mean / (np.sqrt(square) + 1e-3)


@dataclass(frozen=True)
class Table:
    """The probabilities of a world, and the settings of an arm."""

    logits: Mapping[str, float]
    seen: Mapping[int, float]  # frames -> probability that the overview shows the event
    reports_right: float
    config: Config

    @classmethod
    def of(cls, world: World, arm: str) -> "Table":
        scenes = [world.scene(0, number) for number in range(200)]
        config = load_config(CONFIGS / "miniature" / "para_grpo.yaml", *world.train, *settings_of(arm))
        traces = world.mixture(scenes, "weak" if arm == "weak_prior" else "tool")
        opens = {"always": (1.0, 1.0), "source": (1.0, 0.0), "chance": (CURATED_FRAC, CURATED_FRAC)}
        starts = {
            "open curated": opens[traces.thinking][0],
            "open other": opens[traces.thinking][1],
            "close_think": 1 - traces.noise_frac,
            "call seen": (1 - traces.direct_frac) * traces.tools,
            "call unseen": (1 - traces.guess_frac) * traces.tools,
            "close_call": 1 - traces.unclosed_call_frac,
            "close_answer": 1 - traces.unclosed_frac,
        }
        clipped = {coin: min(max(value, 0.02), 0.98) for coin, value in starts.items()}
        budgets = {*config.video.frame_budgets, config.video.overview_frames, *BUDGETS}
        return cls(
            {coin: float(np.log(p / (1 - p))) / config.rollout.temperature for coin, p in clipped.items()},
            {budget: float(np.mean([overview_shows(scene, budget) for scene in scenes])) for budget in budgets},
            1 - traces.wrong_frac,
            config,
        )

    def group(self, policy: Policy, frames: int, forced: bool, rng: np.random.Generator, size: int) -> list[Sample]:
        """Samples the episodes of a prompt."""
        sees, curated = bool(rng.random() < self.seen[frames]), bool(rng.random() < CURATED_FRAC)
        return [self._episode(policy, sees, curated, forced, rng) for _ in range(size)]

    def _episode(self, policy: Policy, sees: bool, curated: bool, forced: bool, rng: np.random.Generator) -> Sample:
        coins: list[Coin] = []

        def toss(name: str) -> bool:
            coins.append((name, bool(rng.random() < policy.heads(name))))
            return coins[-1][1]

        def think() -> None:
            if forced or toss("open curated" if curated else "open other"):
                toss("close_think")

        think()
        executed = False
        if toss("call seen" if sees else "call unseen"):
            executed = toss("close_call")
            think()
        toss("close_answer")
        right = self.reports_right if executed else RIGHT_SEEN if sees else RIGHT_UNSEEN
        plain = tuple((name.partition(" ")[0], side) for name, side in coins)
        return Sample(tuple(coins), scored(plain, bool(rng.random() < right), self.config.reward))

    def start(self) -> Policy:
        return Policy(dict(self.logits))

    def train(self, seed: int) -> Policy:
        rng, policy, config = np.random.default_rng(seed), self.start(), self.config
        forced, video = bool(config.rollout.forced_prefix), config.video
        for _ in range(STEPS):
            groups = []
            for _ in range(config.train.prompts_per_step):
                frames = int(rng.choice(video.frame_budgets or [video.overview_frames]))
                groups.append(self.group(policy, frames, forced, rng, config.train.group_size))
            gradient = self._gradient(groups, policy)
            policy.update({coin: value * config.train.group_size for coin, value in gradient.items()})
        return policy

    def _gradient(self, groups: Sequence[Sequence[Sample]], policy: Policy) -> dict[str, float]:
        """Returns a step's gradient, a mean over its coins."""
        gradient, num_coins, advantage = dict.fromkeys(self.logits, 0.0), 0, self.config.advantage
        step = [self._rewards(group) for group in groups]
        for group, rewards in zip(groups, step, strict=True):
            earned = group_advantages(rewards, advantage, step)
            for number in np.flatnonzero(earned.keep).tolist():
                own, episode = earned.of(number), group[number]
                parts = [episode.scored.properties[name] * value for name, value in own.properties.items()]
                advantages = own.sequence + (own.anchor + own.likelihood) * episode.scored.structural + sum(parts)
                for (coin, side), value in zip(episode.coins, advantages, strict=True):
                    gradient[coin] += value * (side - policy.heads(coin))
            num_coins += sum(len(episode.coins) for episode in group)
        return {coin: value / num_coins for coin, value in gradient.items()}

    def _rewards(self, group: Sequence[Sample]) -> GroupRewards:
        reward = self.config.reward
        terms = with_needed_calls([episode.scored.terms for episode in group], reward)
        scale = reward.anchor_weight * reward.format_weight
        return group_rewards(terms, anchor_scale=scale, config=self.config.advantage)

    def evaluate(self, policy: Policy, frames: int, forced: bool, seed: int) -> np.ndarray:
        """Returns means of METRICS over sampled episodes."""
        rng = np.random.default_rng((seed, frames))
        return np.mean([self.group(policy, frames, forced, rng, 1)[0].metrics for _ in range(EVALUATED)], axis=0)


def predicted(cell: Cell, num_seeds: int) -> list[dict[str, Any]]:
    """Returns means over seeds for each arm, prefix and number of frames; `sft` is the cold start."""
    rows = []
    for arm in (COLD_START, *cell.arms):
        table = Table.of(cell.world, arm)
        policies = [table.start() if arm == COLD_START else table.train(seed) for seed in range(num_seeds)]
        for forced, frames in ((forced, frames) for forced in (False, True) for frames in BUDGETS):
            values = [table.evaluate(policy, frames, forced, seed) for seed, policy in enumerate(policies)]
            means = dict(zip(METRICS, np.mean(values, axis=0).tolist(), strict=True))
            rows.append(cell.row(arm, forced, "parallel", frames) | means)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("scripts.miniature.table_model"), description="Predict the map without a network, in minutes."
    )
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"number of seeds (default {SEEDS})")
    add_debug_flag(parser)
    args = parser.parse_args()
    rows = [row for cell in CELLS for row in predicted(cell, args.seeds)]
    write_rows_of_map(PREDICTIONS, rows, command=f"python -m scripts.miniature.table_model --seeds {args.seeds}")
    print(PREDICTIONS)


if __name__ == "__main__":
    run_cli(main)
