"""The dials of a world: one YAML file per world in `worlds/`, parsed like a run's settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from paravt_jax.config import load_config
from scripts.miniature.traces import Mixture, rows_of, with_calls
from scripts.miniature.world import (
    EVENT_S,
    NUM_DISTRACTORS,
    STEP_S,
    WINDOW_S,
    Kind,
    Question,
    Scene,
    make_scene,
    make_world,
    questions,
    rl_row,
    write_rows,
)

Prior = Literal["tool", "weak"]
WORLDS = Path(__file__).parent / "worlds"


@dataclass(frozen=True)
class World:
    """A world's videos, questions and cold-start traces, and the settings of its runs."""

    num_videos: int = 1024  # held-out videos included
    num_held_out: int = 128
    questions_per_held_out: int = 1  # questions rotate over the videos, so that all kinds occur
    questions: list[Kind] = field(default_factory=lambda: ["window", "either"])
    num_distractors: int = NUM_DISTRACTORS
    event_s: int = EVENT_S  # length of events, even; overviews show longer events more often
    traces: Mixture = field(default_factory=Mixture)
    calls_frac: float = -1.0  # share of traces that call, first those without a visible event; -1: as in `traces`
    trace_budgets: list[int] = field(default_factory=lambda: [4, 8, 16, 32, 64, 64])  # few frames teach calls
    both_prefixes: bool = True  # evaluate the arms without and with the forced prefix
    sft: list[str] = field(default_factory=list)  # settings of the cold start
    continued: list[str] = field(default_factory=list)  # settings of its continuation with another calls_frac
    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if {"unnamed", "both"} <= {*self.questions}:
            raise ValueError("questions=[unnamed, both]: a question without a window needs videos with one color")
        if "range" in self.questions and len(self.questions) > 1:
            raise ValueError(f"questions={self.questions}: `range` cannot be combined with other kinds")
        if self.event_s not in range(STEP_S, WINDOW_S + 1, STEP_S):
            raise ValueError(f"event_s={self.event_s} must be even, and no longer than a window of {WINDOW_S} s")

    def scene(self, seed: int, number: int) -> Scene:
        return make_scene(seed, number, self.num_distractors, "both" in self.questions, self.event_s)

    def mixture(self, scenes: list[Scene], prior: Prior) -> Mixture:
        if prior == "weak":
            return Mixture(tools=False, thinking="always", noise_frac=0.0)
        if self.calls_frac < 0:
            return self.traces
        return with_calls(self.traces, scenes, self.trace_budgets, self.calls_frac)

    def make(self, videos: Path, rows: Path, seed: int, priors: Mapping[str, Prior]) -> None:
        """Writes videos, prompts, and traces of each prior by its name; existing files stay."""
        scenes = make_world(videos, seed, self.num_videos, self.scene)
        train, held_out = scenes[: -self.num_held_out], scenes[-self.num_held_out :]
        rows.mkdir(parents=True, exist_ok=True)
        for part, own, number in (("train", train, 0), ("validation", held_out, 1)):
            for name, prior in priors.items():
                mixture = self.mixture(train, prior)
                traces = rows_of(own, self.trace_budgets, mixture, 2 * seed + number, self.questions)
                write_rows(rows / f"{name}_{part}.jsonl", traces)
        write_rows(rows / "rl_train.jsonl", [rl_row(q) for scene in train for q in questions(scene, self.questions)])
        write_rows(rows / "rl_validation.jsonl", [rl_row(q) for scene in held_out for q in self._held_out(scene)])

    def _held_out(self, scene: Scene) -> list[Question]:
        all_questions = questions(scene, self.questions)
        numbers = {(scene.number + n) % len(all_questions) for n in range(self.questions_per_held_out)}
        return [all_questions[number] for number in sorted(numbers)]


def load_world(name: str, *overrides: str) -> World:
    """Loads a world by its name in `worlds/` or its path; `overrides` are a.b=c."""
    path = WORLDS / f"{name}.yaml" if "/" not in name and not name.endswith(".yaml") else Path(name)
    if not path.exists():
        raise ValueError(f"--world {name} is none of {', '.join(sorted(p.stem for p in WORLDS.glob('*.yaml')))}")
    return load_config(path, *overrides, schema=World)
