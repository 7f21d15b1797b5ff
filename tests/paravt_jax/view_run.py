"""Makes a run directory without training, with real records of scripted episodes that improve over the steps."""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from data_rows import write_lines

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from model_port.tiny import tiny_tokenizer
from paravt_jax.config import Config, to_record
from paravt_jax.data.prompts import Prompt
from paravt_jax.data.sample_order import PromptSample
from paravt_jax.rewards.plugin import load_plugin
from paravt_jax.rewards.settings import RewardConfig
from paravt_jax.rewards.terms import reward_terms
from paravt_jax.rl.episodes import Rollout
from paravt_jax.rl.groups import Group, advantages_of, records
from paravt_jax.rl.metrics import group_metrics, rollout_metrics
from paravt_jax.run.directory import write_settings
from paravt_jax.run.log import EPISODES_DIR, METRICS_FILE, VALIDATION_FILE, json_line
from rollout.chat import Chat
from rollout.ledger import Ledger, Segment
from rollout.picture import Picture
from rollout.prompter import ShownVideo, Task
from rollout.records import Call, Episode, Turn
from rollout.tools import BadCall, find_calls, window_of
from rollout.video.times import crop_times, overview_times

DURATION_S = 1284.0
QUESTIONS = (
    ("mcq", "<video>\nWhat does the potter do after the bowl cracks?\nA. Throws it away\nB. Wets the rim", "B"),
    ("tvg", "<video>\nWhen does the cyclist repair the tyre? Answer with [start, end] in seconds.", "[512, 561]"),
    ("oe", "<video>\nWhich instrument joins last before the refrain?", "a cello"),
)
RIGHT = {"mcq": "B", "tvg": "[508, 559]", "oe": "the cello"}
WRONG = {"mcq": "C", "tvg": "[90, 140]", "oe": "a violin"}
REPORTS = (
    "Nothing of the kind.",
    "From 514 to 553 seconds the work is done close to the camera.",
    "The scene is over.",
)
NASTY = (  # texts that could break a page
    "<think>\n</script><script>alert(1)</script><img src=x onerror=alert(1)></think>",
    "<think>\n\"'`${data} $script $$ {{js}} &lt; &amp; <!-- <script> --> ]]> \\u003c </style></textarea></think>",
    "<think>\nNUL \x00 ESC \x1b bell \x07 lines \u2028 \u2029 turned \u202e around \u2066</think>",
    "<think>\nhalf of a pair \ud83d and the other \ude00</think>",
    "<think>\n\U0001f3fa before a tag</think><answer>B</answer>",
    "<think>" * 300 + "</answer>" * 300,
)
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "own_reward.py"
PLUGIN = load_plugin(RewardConfig(plugin=f"{EXAMPLE}:reward"))
assert PLUGIN is not None
CHAT = Chat(tiny_tokenizer(), CHAT_TEMPLATE)
VIDEO = "/videos/studio.mp4"
MAX_CHARS = 4_000  # number of tokenized texts; more would only take time
PICTURE = Picture.of(np.zeros((2, 2, 3), np.uint8))


def called(start_s: float, end_s: float) -> str:
    arguments = {"video_path": "video.mp4", "start_time": start_s, "end_time": end_s}
    return f"<tool_call>\n{json.dumps({'name': 'crop_video', 'arguments': arguments})}\n</tool_call>"


def answered(answer: str) -> str:
    return f"<think>\nThe second report settles it.\n</think>\n<answer>{answer}</answer>"


def looked(*windows: tuple[float, float]) -> str:
    calls = "\n".join(called(*window) for window in windows)
    return f"<think>\nI look before, at the moment itself, and after.\n</think>\n{calls}"


STORIES = {  # name -> turns for an answer
    "parallel": lambda answer: [looked((240, 300), (500, 565), (700, 760)), answered(answer)],
    "two calls": lambda answer: [looked((480, 540), (530, 590)), answered(answer)],
    "bad window": lambda answer: [looked((565, 500), (500, 565)), answered(answer)],
    "no tool": lambda answer: [
        f"<think>\nThe frames at 480 and 540 seconds are enough to tell.\n</think>\n<answer>{answer}</answer>"
    ],
    "unclosed": lambda answer: [f"<think>\nI think that it is {answer}, because of the frame at 512 seconds."],
    "leak": lambda answer: [
        "<think>\nHere I need a closer look.\n</think>\n<tool_code>crop_video('video.mp4', 480, 560)</tool_code>",
        f"So it must be <answer>{answer}</answer>",
    ],
}


def make_run(
    run_dir: Path, num_steps: int = 3, *, num_planned: int = 5, texts: Sequence[str] = (), luck: int = 0
) -> Path:
    """Writes a run directory. Each of `texts` is the only turn of an extra episode in the first step."""
    config = Config(run_dir=str(run_dir))
    run_dir.mkdir(parents=True, exist_ok=True)
    write_settings(to_record(config), run_dir)
    settings = json.loads((run_dir / "config.json").read_text())
    settings["config"]["train"]["num_steps"] = num_planned
    (run_dir / "config.json").write_text(json.dumps(settings))
    chance = np.random.default_rng(luck)
    (run_dir / EPISODES_DIR).mkdir()
    rows, held_out = [], []
    for step in range(1, num_steps + 1):
        skill = (step - 1) / max(1, num_planned - 1)
        groups = [_group(3 * step + n, config, skill, chance) for n in range(3)]
        if step == 1 and texts:
            groups.append(_group_of(99, [[text] for text in texts], 4, config, chance))
        rows.append({"step": step} | dict(sorted(_metrics(groups, step, skill, chance).items())))
        _write_lines(run_dir / EPISODES_DIR / f"{step:06d}.jsonl", records(groups, step, CHAT))
        if step % max(1, num_planned // 5) == 0:
            metrics = rollout_metrics([rollout for group in groups for rollout in group.rollouts])
            held_out.append({"step": step} | {f"validation/{name}": value for name, value in sorted(metrics.items())})
    _write_lines(run_dir / METRICS_FILE, rows)
    _write_lines(run_dir / VALIDATION_FILE, held_out)
    return run_dir


def _write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes lines like a run's log, which would also import TensorBoard's dependencies."""
    path.write_bytes(b"".join(map(json_line, rows)))


def write_metrics(run_dir: Path, rows: list[dict]) -> Path:
    return write_lines(run_dir / "metrics.jsonl", rows).parent


def _group(number: int, config: Config, skill: float, chance: np.random.Generator) -> Group:
    names = list(STORIES)
    wishes = np.array([0.15 + 4 * skill, 0.3 + 2 * skill, 0.5, 1.2, 2.4 * (1 - skill), 1.5 * (1 - skill)])
    question_type, _, _ = QUESTIONS[number % len(QUESTIONS)]
    turns = []
    for name in chance.choice(names, config.train.group_size, p=wishes / wishes.sum()):
        answers = RIGHT if chance.random() < 0.3 + 0.5 * skill else WRONG
        turns.append(STORIES[name](answers[question_type]))
    budget = int(chance.choice(config.video.frame_budgets))
    return _group_of(number, turns, budget, config, chance, one_missing=number % 5 == 0)


def _group_of(
    number: int,
    stories: Sequence[Sequence[str]],
    frame_budget: int,
    config: Config,
    chance: np.random.Generator,
    one_missing: bool = False,
) -> Group:
    question_type, question, answer = QUESTIONS[number % len(QUESTIONS)]
    prompt = Prompt(f"{number:016x}", question, (VIDEO,), answer, question_type)
    name = f"{number:06d}-{prompt.id}"
    task = Task(name, question, prompt.videos, frame_budget)
    rollouts = []
    for index, turns in enumerate(stories):
        if one_missing and index == 5:
            problem = "EngineError: no server answered within 600.0 s"
            rollouts.append(Rollout(f"{name}/{index}", problem=problem, reason="engine"))
            continue
        episode = _episode(f"{name}/{index}", task, turns, chance)
        own = asyncio.run(PLUGIN.terms(episode, answer, question_type))
        terms = reward_terms(turns, episode.outcomes, answer, question_type, config.reward, own=own)
        fixed = reward_terms(turns, episode.outcomes, answer, question_type, RewardConfig())
        rollouts.append(Rollout(episode.id, episode, terms, fixed.format))
    advantages = advantages_of(rollouts, config.reward, config.advantage)
    return Group(PromptSample(number, 0, prompt), frame_budget, rollouts, advantages)


def _episode(name: str, task: Task, turns: Sequence[str], chance: np.random.Generator) -> Episode:
    times_s = tuple(overview_times(DURATION_S, round(30 * DURATION_S), task.frame_budget))
    videos = (ShownVideo("video.mp4", VIDEO, DURATION_S, times_s),)
    episode = Episode(name, task, Ledger(), videos=videos, overview_s=float(chance.uniform(2, 5)))
    episode.ledger.add("prompt", CHAT.encode(f"{DURATION_S} seconds\n{task.question}"), [PICTURE] * len(times_s))
    for text in turns:
        begin = len(episode.ledger.ids)
        forced = "<think>\n" if text.startswith("<think>\n") else ""
        episode.ledger.add("forced", CHAT.encode(forced))
        _sampled(episode.ledger, f"{text.removeprefix(forced)}<|im_end|>", chance)
        turn = Turn(text, "stop", (begin, len(episode.ledger.ids)), [], float(chance.uniform(2, 9)), episode.seconds)
        episode.seconds += turn.latency_s
        for index, call in enumerate(find_calls(text)):
            turn.calls.append(_call(call, index, episode.seconds, chance))
        episode.seconds += max((call.latency_s for call in turn.calls), default=0.0)
        episode.turns.append(turn)
        episode.ledger.add("environment", CHAT.encode("report"))
    return episode


def _call(parsed, index: int, started_s: float, chance: np.random.Generator) -> Call:
    call = Call(parsed, "ok", REPORTS[index % len(REPORTS)], latency_s=0.001, started_s=started_s)
    try:
        if parsed.problem is not None:
            raise parsed.problem
        call.window = window_of(parsed.arguments, DURATION_S)
    except BadCall as problem:
        call.outcome, call.response, call.problem = problem.outcome, f"Error: {problem}.", f"BadCall: {problem}"
        return call
    call.path, call.latency_s = VIDEO, float(chance.uniform(3, 12))
    call.frames_s = tuple(crop_times(call.window.start_s, call.window.end_s))
    call.report = Ledger()
    call.report.add("prompt", CHAT.encode("look"), [PICTURE] * len(call.frames_s))
    _sampled(call.report, call.response, chance)
    return call


def _sampled(ledger: Ledger, text: str, chance: np.random.Generator) -> None:
    ids = CHAT.encode(text[:MAX_CHARS].encode(errors="replace").decode())  # tokenizers reject lone surrogates
    ledger.segments.append(Segment("sampled", ids, (), -chance.exponential(0.4, len(ids)), 2))


def _metrics(groups: Sequence[Group], step: int, skill: float, chance: np.random.Generator) -> dict[str, float]:
    noise = abs(chance.normal(0, 1, 4))
    return {
        **group_metrics(groups),
        "policy_version": float(step),
        "loss/policy": 0.02 * noise[0],
        "loss/kl_ref": 0.4 * skill + 0.01 * noise[1],
        "optim/grad_norm": 0.8 + 0.2 * noise[2],
        "mismatch/behavior_kl": 4e-4 * np.exp(noise[3]),
        "mismatch/behavior_kl_structural": 9e-4 * np.exp(noise[3]),
        "time/rollout_s": 100 + noise[0],
        "time/update_s": 80 + noise[1],
        "time/publish_s": 4.0,
        "time/step_s": 200.0,
        "perf/dummy_frac": 0.06,
    }
