"""The parity gate: do the servers compute what the learner computes?

    python -m rollout.check --model CKPT --url URL [--url URL …]

Episodes are played on each server over test pictures of several sizes, then dialogues with every structural token are
added, and the learner scores the same ids and pictures. The gate compares the log-prob of every token that was sampled,
as the server gave it while sampling, and of every token of a dialogue, as the server scores it; and the ids after
expansion, which differ at once when a server resizes a picture. A trainer runs the gate before its first step.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from rollout.chat import Chat
from rollout.cli import add_debug_flag, prog_of, run_cli
from rollout.engine.http import HttpClient
from rollout.engine.listing import check_url
from rollout.engine.protocol import Sampling
from rollout.engine.sglang import SGLangEngine, generate_body
from rollout.episode import Agent, EpisodeConfig, Task
from rollout.ledger import Ledger
from rollout.output_file import OutputFile
from rollout.picture import Picture
from rollout.terminal import say
from rollout.video.box import Box
from rollout.video.reader import TimedPicture, VideoInfo

# Height and width of videos as they are found: 16:9, 4:3, 1:1, upright, cinema, and a very small one.
VIDEO_SIZES_PX = ((1080, 1920), (480, 640), (512, 512), (1280, 720), (800, 1920), (64, 96))
STRUCTURAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_end|>")
KINDS = ("sampled", "dialogue", "after_image", "structural")
FIRST_TURN = (
    "<think>\nI look closer.</think>\n\n<tool_call>\n"
    '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 20, "end_time": 30}}\n'
    "</tool_call><|im_end|>"
)
LAST_TURN = "<think>\nThe report says it.</think><answer>A</answer><|im_end|>"
DURATION_S = 60.0
FRAMES_SHOWN = 4
NEW_TOKENS = 64
TEMPERATURE = 0.7
SCORER_DEADLINE_S = 600.0  # of one answer; the first ones compile


@dataclass(frozen=True)
class Bound:
    max: float
    mean: float = float("inf")


BOUNDS = {"float32": Bound(1e-4), "bfloat16": Bound(0.1, 0.02)}


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    ids: np.ndarray  # int32, one placeholder a picture
    pictures: tuple[Picture, ...]
    temperature: float | int = 1.0


@dataclass(frozen=True, eq=False)
class Scored:
    ids: np.ndarray  # int32, expanded
    logp: np.ndarray  # float32; index t is the log-prob of token t, the first has none


class Scorer(Protocol):
    """The learner's side: `paravt_jax.sampling.score.LearnerScorer`, or a process that has one."""

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]: ...


@dataclass
class Difference:
    """Absolute differences of log-probs over some tokens."""

    num_tokens: int = 0
    max: float = 0.0
    total: float = 0.0

    def add(self, values: np.ndarray) -> None:
        if len(values):
            self.num_tokens += len(values)
            self.max = max(self.max, float(values.max()))
            self.total += float(values.sum())

    @property
    def mean(self) -> float:
        return self.total / max(self.num_tokens, 1)


@dataclass
class Parity:
    """What was found on one server, by kind of token: sampled, in given dialogues, and two of special interest."""

    url: str
    dtype: str
    differences: dict[str, Difference] = field(default_factory=lambda: {name: Difference() for name in KINDS})
    wrong_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in BOUNDS:
            raise ValueError(
                f"{self.url} computes in {self.dtype}, the gate has bounds for {' and '.join(BOUNDS)}; start it in one"
            )

    @property
    def bound(self) -> Bound:
        return BOUNDS[self.dtype]

    def add(self, kind: str, differences: np.ndarray) -> None:
        self.differences[kind].add(differences)

    @property
    def problems(self) -> list[str]:
        problems = list(self.wrong_ids)
        for name, difference in self.differences.items():
            if difference.num_tokens == 0:
                problems.append(f"no token was compared for {name!r}")
            elif not (difference.max <= self.bound.max and difference.mean <= self.bound.mean):
                problems.append(
                    f"log-probs of {name!r} tokens differ by {difference.max:.3g} at most and {difference.mean:.3g} on "
                    f"average, allowed are {self.bound.max:g} and {self.bound.mean:g}"
                )
        return problems

    def to_record(self) -> dict[str, Any]:
        differences = {
            name: {**asdict(difference), "mean": difference.mean} for name, difference in self.differences.items()
        }
        return {"url": self.url, "dtype": self.dtype, "differences": differences, "problems": self.problems}


async def check(
    urls: Sequence[str],
    scorer: Scorer,
    chat: Chat,
    *,
    num_episodes: int = 12,
    deadline_s: float = 300.0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[Parity]:
    """The parity of every server; `num_episodes` are played on each, at least one for every size of picture."""
    sizes_px = list(dict.fromkeys(await asyncio.to_thread(scorer.settled, VIDEO_SIZES_PX)))
    client = HttpClient.make()
    try:
        parities = []
        for url in urls:
            info = await client.get(f"{url}/server_info", deadline_s)
            parity = Parity(url, str(info.get("dtype")))
            for number, size_px in enumerate(sizes_px):
                on_progress(f"{url}: pictures of {size_px[0]} x {size_px[1]} px ({number + 1} of {len(sizes_px)})")
                card = await _play(url, size_px, chat, -(-num_episodes // len(sizes_px)), info, deadline_s)
                for ledger in card.ledgers:
                    await _compare_sampled(parity, ledger, scorer, chat)
                theirs = await _server_scores(client, url, card.dialogue, deadline_s)
                (ours,) = await asyncio.to_thread(scorer.score, [card.dialogue])
                _compare_dialogue(parity, theirs, ours, chat, size_px)
            parities.append(parity)
        return parities
    finally:
        await client.close()


@dataclass(frozen=True, eq=False)
class _Card:
    """What was played with pictures of one size."""

    ledgers: list[Ledger]
    dialogue: ScoreRequest


async def _play(
    url: str, size_px: tuple[int, int], chat: Chat, num_episodes: int, info: dict[str, Any], deadline_s: float
) -> _Card:
    config = EpisodeConfig(
        max_turns=1,
        max_new_tokens=NEW_TOKENS,
        subagent_new_tokens=NEW_TOKENS,
        max_context_tokens=int(info["context_length"]),
        temperature=TEMPERATURE,
        turn_deadline_s=deadline_s,
    )
    engine = await SGLangEngine.connect([url])
    try:
        agent = Agent(engine, TestCard(size_px), chat, config)
        overview = await agent.look(Task(f"card-{size_px}", "What is shown?", ("card.mp4",), FRAMES_SHOWN))
        episodes = await asyncio.gather(*(agent.run(overview, number) for number in range(num_episodes)))
    finally:
        await engine.close()
    ids = np.concatenate([overview.ids, chat.encode(FIRST_TURN)])
    ids = np.concatenate([ids, chat.after_turn(ids, ["A report."]), chat.encode(LAST_TURN)])
    ledgers = [ledger for episode in episodes for ledger in episode.ledgers]
    return _Card(ledgers, ScoreRequest(ids, overview.pictures))


async def _compare_sampled(parity: Parity, ledger: Ledger, scorer: Scorer, chat: Chat) -> None:
    """Log-probs as the server gave them while it sampled."""
    if any(not chat.visual_ids.isdisjoint(segment.ids.tolist()) for segment in ledger.sampled):
        return  # a placeholder that shows nothing cannot be scored
    (ours,) = await asyncio.to_thread(scorer.score, [ScoreRequest(ledger.ids, ledger.pictures, TEMPERATURE)])
    sampled = ledger.sampled_mask
    differences = np.abs(ours.logp[sampled_positions(ledger, chat)] - ledger.behavior_logp[sampled])
    parity.add("sampled", differences)
    parity.add("structural", differences[_structural(ledger.ids[sampled], chat)])


def _compare_dialogue(parity: Parity, theirs: Scored, ours: Scored, chat: Chat, size_px: tuple[int, int]) -> None:
    """Log-probs as the server scores a dialogue that is given."""
    if not np.array_equal(theirs.ids, ours.ids):
        parity.wrong_ids.append(
            f"pictures of {size_px[0]} x {size_px[1]} px expand to {len(theirs.ids)} ids on {parity.url} and to "
            f"{len(ours.ids)} in the learner; the server resizes pictures, start it with python -m rollout.serve"
        )
        return
    differences = np.abs(theirs.logp - ours.logp)[1:]
    shown = ours.ids == chat.image_id
    parity.add("dialogue", differences[~shown[1:]])
    parity.add("after_image", differences[shown[:-1] & ~shown[1:]])
    parity.add("structural", differences[_structural(ours.ids[1:], chat)])


async def _server_scores(client: HttpClient, url: str, request: ScoreRequest, deadline_s: float) -> Scored:
    body = generate_body(request.ids, request.pictures, Sampling(1, request.temperature))
    body |= {"logprob_start_len": 0, "return_prompt_token_ids": True}
    answer = await client.post(f"{url}/generate", body, deadline_s)
    logp = [0.0 if logp is None else logp for logp, *_ in answer["meta_info"]["input_token_logprobs"]]
    return Scored(np.array(answer["prompt_token_ids"], np.int32), np.array(logp, np.float32))


def sampled_positions(ledger: Ledger, chat: Chat) -> np.ndarray:
    """Where the sampled ids stand after expansion."""
    counts = ledger.num_tokens_each(chat.image_id, EpisodeConfig.token_px)
    return (np.cumsum(counts) - 1)[ledger.sampled_mask]


def _structural(ids: np.ndarray, chat: Chat) -> np.ndarray:
    tokens = [token for token in map(chat.tokenizer.token_to_id, STRUCTURAL) if token is not None]
    return np.isin(ids, tokens)


@dataclass(frozen=True)
class TestCard:
    """A video of noise over a gradient, at one size: nothing that a resize or a lossy format would leave alone."""

    size_px: tuple[int, int]

    async def info(self, path: str, deadline_s: float | int) -> VideoInfo:
        return VideoInfo("test card", DURATION_S, int(DURATION_S), *self.size_px)

    async def frames(
        self, path: str, times_s: Sequence[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        return [TimedPicture(time_s, Picture.of(self._pixels(int(time_s * 10)))) for time_s in times_s]

    def _pixels(self, seed: int) -> np.ndarray:
        height, width = self.size_px
        gradient = np.linspace(0, 160, height)[:, None, None] + np.linspace(0, 64, width)[None, :, None]
        noise = np.random.default_rng(seed).integers(0, 32, (height, width, 3))
        return (gradient + noise).astype(np.uint8)


class ProcessScorer:
    """A scorer in a process of its own, which is asked in JSON lines."""

    def __init__(self, command: Sequence[str]):
        self._command = command
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        return [(height, width) for height, width in self._ask({"settle": list(sizes_px)})["sizes_px"]]

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]:
        return [self._score_one(request) for request in requests]

    def _score_one(self, request: ScoreRequest) -> Scored:
        pictures = [picture.png_base64 for picture in request.pictures]
        answer = self._ask({"ids": request.ids.tolist(), "pictures": pictures, "temperature": request.temperature})
        return Scored(np.array(answer["ids"], np.int32), np.array(answer["logp"], np.float32))

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(SCORER_DEADLINE_S, self._process.kill)
        late.start()
        try:
            with contextlib.suppress(BrokenPipeError):  # the missing answer tells more
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        if not line:
            code = self._process.wait()
            raise RuntimeError(f"`{shlex.join(self._command)}` ended with exit code {code}; what it said is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def table(parities: Sequence[Parity]) -> str:
    """The result as a Markdown table."""
    lines = ["| server | dtype | tokens | compared | mean difference | largest | allowed |", "|---" * 7 + "|"]
    for parity in parities:
        for name, difference in parity.differences.items():
            lines.append(
                f"| {parity.url} | {parity.dtype} | {name} | {difference.num_tokens} | {difference.mean:.2e} | "
                f"{difference.max:.2e} | {parity.bound.max:g} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("rollout.check"),
        description="Compares the log-probs of SGLang servers with the learner's; fails when they differ too much.",
    )
    parser.add_argument("--model", required=True, help="what the learner loads: a Hugging Face directory or checkpoint")
    parser.add_argument("--url", required=True, action="append", help="of a server; give it again for more servers")
    parser.add_argument("--tokenizer", help="directory with tokenizer and chat template; by default the model's")
    parser.add_argument("--dtype", choices=[*BOUNDS], default="float32", help="of the learner, as on the servers")
    parser.add_argument("--episodes", type=int, default=12, help="played on each server")
    parser.add_argument("--json", metavar="OUT", help="also write the result to this file")
    parser.add_argument("--force", action="store_true", help="replace OUT also if this command did not write it")
    add_debug_flag(parser)
    args = parser.parse_args()
    read = [args.model, args.tokenizer or ""]
    result = args.json and OutputFile(args.json, "check --json", inputs=read, force=args.force)
    model = Path(args.model)
    in_checkpoint = model / "hf"  # a converted checkpoint keeps these files there
    chat = Chat.from_hf(args.tokenizer or (in_checkpoint if in_checkpoint.is_dir() else model))
    scorer = ProcessScorer(
        [sys.executable, "-m", "paravt_jax.sampling.score", "--model", args.model, "--dtype", args.dtype]
    )
    try:
        urls = [url.rstrip("/") for url in args.url]
        for url in urls:
            check_url("--url", url)
        parities = asyncio.run(check(urls, scorer, chat, num_episodes=args.episodes, on_progress=say))
    finally:
        scorer.close()
    print(table(parities))
    if result:
        result.write(json.dumps([parity.to_record() for parity in parities], indent=2) + "\n")
    problems = [f"{parity.url}: {problem}" for parity in parities for problem in parity.problems]
    if problems:
        raise RuntimeError("the servers and the learner disagree: " + "; ".join(problems))


if __name__ == "__main__":
    run_cli(main)
