"""The parity gate: do the servers compute what the learner computes?

    python -m rollout.check --model CKPT --url URL [--url URL …]

Episodes are played on each server over test pictures of several sizes, then dialogues with every structural token are
added, and the learner scores the same ids and pictures. The gate compares the log-prob of every token that was sampled,
as the server gave it while sampling, and of every token of a dialogue, as the server scores it; and the ids after
expansion, which differ at once when a server resizes a picture. A trainer runs the gate before its first step.

How far rounding moves a log-prob depends on the model: on how wide its logits are, how deep it is, and how its layers
pass an error on. So no bound is a number of nats. The learner scores every token twice from the weights that servers
have, in float32 and in bfloat16. The distance between the two is the noise of bfloat16 on this very token, and a server
may be so many times as far from the first. Distances are compared by their quantiles and by their KL.
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
from rollout.engine.discovery import check_url
from rollout.engine.http import HttpClient
from rollout.engine.protocol import EngineError, Sampling
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

# How many times as far from the learner's float32 a server may be as the learner's own bfloat16 is. Right servers were
# measured at 0.9 to 1.5 in bfloat16, and at 1e-4 in float32, whose roundings are 2^-16 of those and add up in sums. A
# rope_theta twice as large is at 40, pictures that changed places at 10, one layer that is off by 3 % at 4.
TIMES_NOISE = {"bfloat16": 3.0, "float32": 2.0**-10}
QUANTILES = {"half within": 0.5, "90 % within": 0.9, "99 % within": 0.99}
# What few tokens decide is uncertain by itself, on both sides: where n are beyond a quantile, or make up a mean, it may
# be 1 + FEW / √n times as far. A quantile with fewer than MIN_BEYOND is next to the largest value, and not judged.
FEW, MIN_BEYOND = 2.0, 5
# Beyond it a model is not fit for bfloat16, or the learner computes nonsense in it: no server is judged by such noise.
MAX_NOISE_KL = 0.03
TINY = 1e-30  # where nothing may be divided by 0
FLOOR = 1e-5  # nats; where a log-prob is 0 in bfloat16 as well, float32 still rounds


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    ids: np.ndarray  # int32, one placeholder a picture
    pictures: tuple[Picture, ...]
    temperature: float | int = 1.0


@dataclass(frozen=True, eq=False)
class Scored:
    """By the learner, from weights as servers have them."""

    ids: np.ndarray  # int32, expanded
    logp: np.ndarray  # computed in float32; index t is the log-prob of token t, the first has none
    bfloat16_logp: np.ndarray  # the same in bfloat16

    def offsets(self, logp: np.ndarray, where: Any = slice(None)) -> np.ndarray:
        """From the log-probs in float32 of these tokens to those of a server, and to the learner's in bfloat16."""
        return self.logp[where] - np.stack([logp, self.bfloat16_logp[where]])


class Scorer(Protocol):
    """The learner's side: `paravt_jax.sampling.score.LearnerScorer`, or a process that has one."""

    def settled(self, sizes_px: Sequence[tuple[int, int]]) -> list[tuple[int, int]]: ...

    def score(self, requests: Sequence[ScoreRequest]) -> list[Scored]: ...


@dataclass(frozen=True)
class Compared:
    """One statistic of the distances from the learner in float32."""

    name: str
    server: float
    noise: float  # the learner's own, in bfloat16
    allowed: float

    @property
    def problem(self) -> str:
        if self.server <= self.allowed:
            return ""
        return f"{self.name} {self.server:.3g}, allowed is {self.allowed:.3g}"


@dataclass
class Difference:
    """Distances of log-probs over some tokens."""

    times_noise: float
    sampled: bool = False  # whether the server drew the tokens: then they give its KL from the learner
    offsets: np.ndarray = field(default_factory=lambda: np.zeros((2, 0)))  # of the server, of the noise

    def add(self, offsets: np.ndarray) -> None:
        self.offsets = np.concatenate([self.offsets, offsets], axis=1)

    @property
    def num_tokens(self) -> int:
        return self.offsets.shape[1]

    @property
    def kl(self) -> Compared:
        """KL(server‖learner in float32) a token, by Schulman's k3; as a square it may be so many times squared."""
        terms = k3(self.offsets)
        server, noise = terms.mean(axis=1).tolist()
        shares = terms[1] / max(terms[1].sum(), TINY)
        num_decisive = 1 / max(float(np.square(shares).sum()), TINY)
        return Compared("KL", server, noise, max(self._times(num_decisive) ** 2 * noise, float(k3(FLOOR))))

    @property
    def compared(self) -> list[Compared]:
        if not self.num_tokens:
            return []
        beyond = {name: (1 - part) * self.num_tokens for name, part in QUANTILES.items()}
        quantiles = [self._quantile(name, num) for name, num in beyond.items() if num >= MIN_BEYOND]
        return [self.kl, *quantiles] if self.sampled else quantiles

    def _quantile(self, name: str, num_beyond: float) -> Compared:
        server, noise = np.quantile(np.abs(self.offsets), QUANTILES[name], axis=1).tolist()
        return Compared(name, server, noise, max(self._times(num_beyond) * noise, FLOOR))

    def _times(self, num_decisive: float) -> float:
        return self.times_noise * (1 + FEW / num_decisive**0.5)


def k3(offsets: Any) -> Any:
    return np.expm1(offsets) - offsets


@dataclass
class Parity:
    """What was found on one server, by kind of token: sampled, in given dialogues, and two of special interest."""

    url: str
    dtype: str
    differences: dict[str, Difference] = field(init=False)
    wrong_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.dtype not in TIMES_NOISE:
            raise ValueError(
                f"{self.url} computes in {self.dtype}, the gate judges {' and '.join(TIMES_NOISE)}; start it in one"
            )
        self.differences = {kind: Difference(TIMES_NOISE[self.dtype], kind == "sampled") for kind in KINDS}

    def add(self, kind: str, offsets: np.ndarray) -> None:
        self.differences[kind].add(offsets)

    @property
    def problems(self) -> list[str]:
        problems = list(self.wrong_ids)
        for kind, difference in self.differences.items():
            if difference.num_tokens == 0:
                problems.append(f"no token was compared for {kind!r}")
            elif beyond := [compared.problem for compared in difference.compared if compared.problem]:
                problems.append(
                    f"log-probs of {kind!r} tokens differ from the learner's in float32: {'; '.join(beyond)}"
                )
        sampled = self.differences["sampled"]
        if self.dtype == "bfloat16" and sampled.num_tokens and not sampled.kl.noise <= MAX_NOISE_KL:
            problems.append(
                f"the learner itself is off by a KL of {sampled.kl.noise:.3g} in bfloat16, more than {MAX_NOISE_KL}: "
                f"no server can be judged by that; compute this model in float32, learner and servers"
            )
        return problems

    def to_record(self) -> dict[str, Any]:
        differences = {
            kind: {"num_tokens": difference.num_tokens, "compared": [asdict(one) for one in difference.compared]}
            for kind, difference in self.differences.items()
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
                ids, logp = await _server_scores(client, url, card.dialogue, deadline_s)
                (ours,) = await asyncio.to_thread(scorer.score, [card.dialogue])
                _compare_dialogue(parity, ids, logp, ours, chat, size_px)
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
        overview = await agent.overview(Task(f"card-{size_px}", "What is shown?", ("card.mp4",), FRAMES_SHOWN))
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
    offsets = ours.offsets(ledger.behavior_logp[sampled], sampled_positions(ledger, chat))
    parity.add("sampled", offsets)
    parity.add("structural", offsets[:, _structural(ledger.ids[sampled], chat)])


def _compare_dialogue(
    parity: Parity, ids: np.ndarray, logp: np.ndarray, ours: Scored, chat: Chat, size_px: tuple[int, int]
) -> None:
    """Ids and log-probs as the server gives them for a dialogue."""
    if not np.array_equal(ids, ours.ids):
        parity.wrong_ids.append(
            f"pictures of {size_px[0]} x {size_px[1]} px expand to {len(ids)} ids on {parity.url} and to "
            f"{len(ours.ids)} in the learner; the server resizes pictures, start it with python -m rollout.serve"
        )
        return
    offsets = ours.offsets(logp)[:, 1:]
    shown = ours.ids == chat.image_id
    parity.add("dialogue", offsets[:, ~shown[1:]])
    parity.add("after_image", offsets[:, shown[:-1] & ~shown[1:]])
    parity.add("structural", offsets[:, _structural(ours.ids[1:], chat)])


async def _server_scores(
    client: HttpClient, url: str, request: ScoreRequest, deadline_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """The ids after expansion, and the log-prob of each."""
    body = generate_body(request.ids, request.pictures, Sampling(1, request.temperature))
    body |= {"logprob_start_len": 0, "return_prompt_token_ids": True}
    answer = await client.post(f"{url}/generate", body, deadline_s)
    logp = [0.0 if logp is None else logp for logp, *_ in answer["meta_info"]["input_token_logprobs"]]
    ids = np.array(answer["prompt_token_ids"], np.int32)
    if len(ids) != len(logp):
        raise EngineError(f"{url} gave {len(logp)} log-probs for {len(ids)} ids")
    return ids, np.array(logp, np.float32)


def sampled_positions(ledger: Ledger, chat: Chat) -> np.ndarray:
    """Where the sampled ids stand after expansion."""
    counts = ledger.num_tokens_each(chat.image_id, EpisodeConfig.token_px)
    return (np.cumsum(counts) - 1)[ledger.sampled_mask]


def _structural(ids: np.ndarray, chat: Chat) -> np.ndarray:
    tokens = [token for token in map(chat.tokenizer.token_to_id, STRUCTURAL) if token is not None]
    return np.isin(ids, tokens)


@dataclass(frozen=True)
class TestCard:
    """A video of noise over a gradient, at one size: nothing that a resize or a lossy format would leave alone.

    Each frame has colours of its own, so that it matters which comes first.
    """

    size_px: tuple[int, int]

    async def info(self, path: str, deadline_s: float | int) -> VideoInfo:
        return VideoInfo("test card", DURATION_S, int(DURATION_S), *self.size_px)

    async def frames(
        self, path: str, times_s: Sequence[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        return [TimedPicture(time_s, Picture.of(self._pixels(int(time_s * 10)))) for time_s in times_s]

    def _pixels(self, seed: int) -> np.ndarray:
        height, width = self.size_px
        random = np.random.default_rng(seed)
        down, across = random.uniform(0, 112, (2, 3))
        gradient = np.linspace(0, down, height)[:, None] + np.linspace(0, across, width)[None]
        noise = random.integers(0, 32, (height, width, 3))
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
        logps = (np.array(answer[name], np.float32) for name in ("logp", "bfloat16_logp"))
        return Scored(np.array(answer["ids"], np.int32), *logps)

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
    heads = ["server", "computes in", "tokens", "compared", "differences from the learner in float32"]
    heads += ["the server's", "the learner's own in bfloat16", "allowed"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for parity in parities:
        for kind, difference in parity.differences.items():
            tokens = f"| {parity.url} | {parity.dtype} | {kind} | {difference.num_tokens} |"
            for one in difference.compared:
                lines.append(f"{tokens} {one.name} | {one.server:.2e} | {one.noise:.2e} | {one.allowed:.2e} |")
    times = " or ".join(f"{TIMES_NOISE[dtype]:.3g} ({dtype})" for dtype in dict.fromkeys(one.dtype for one in parities))
    lines += [
        "",
        f"Allowed are {times} times the learner's own, squared for the KL, and more where few tokens were compared.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog=prog_of("rollout.check"),
        description="Compares the log-probs of SGLang servers with the learner's; fails when they differ too much.",
    )
    parser.add_argument("--model", required=True, help="what the learner loads: a Hugging Face directory or checkpoint")
    parser.add_argument("--url", required=True, action="append", help="of a server; give it again for more servers")
    parser.add_argument("--tokenizer", help="directory with tokenizer and chat template; by default the model's")
    parser.add_argument("--dtype", choices=[*TIMES_NOISE], default="float32", help="that the servers compute in")
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
