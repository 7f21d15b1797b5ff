"""Fault injection for a service: clients send requests continuously; each must get its own answer or a clear error."""

import asyncio
import itertools
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from model_port.hf_files import RECIPE_FILE
from paravt_jax.config import load_config
from paravt_jax.run.recipe import recipe_of
from rollout.chat import Chat
from scripts.bench.chaos.faults import SERVICE, Fault
from scripts.bench.chaos.stage import SETTINGS, Exit, Stage
from scripts.bench.hosts import free_port
from scripts.bench.smoke_run import CONFIG, SETTINGS as SMOKE_SETTINGS

NUM_CLIENTS, MAX_QUESTIONS = 4, 3  # one more client than the service accepts at a time
DEADLINE_S = 40.0
LATE_S = 45.0  # extra response time while a fault stops or slows the service down
LEAVES_EVERY, LEAVES_AFTER_S, PAUSE_S = 5, 0.3, 0.5
RESTART_S = 15.0  # a service that shuts down first closes its connections, and exits within this time
END_CHARS, SHOWN_CHARS = 12, 200
END_OF_TURN = re.compile(r"<\|(im_end|endoftext)\|>$")  # not part of a turn's text
REFUSALS = {429: "busy", 503: "unavailable", 504: "deadline"}


class ClientRequest(NamedTuple):
    """One request and its response."""

    question: str
    begin_s: float
    end_s: float
    status: int  # 0: the connection failed
    body: str


class ServiceStage(Stage):
    """The servers, a service that samples from them, and clients."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self.outcomes: Counter[str] = Counter()
        self.exits: list[Exit] = []
        self.samples: dict[str, list[str]] = {}  # question: texts sampled for it
        self._port = free_port()
        self._service: asyncio.subprocess.Process | None = None
        self._listening = False  # whether the current process listens already
        self._chat: Chat | None = None
        self._clients: list[asyncio.Task[None]] = []
        self._numbers = itertools.count()
        self._faults: list[tuple[Fault, float, float]] = []  # begin, end

    def record(self, sent: dict[str, Any], answer: dict[str, Any]) -> None:
        assert self._chat is not None
        question = question_in(self._chat.decode(sent["input_ids"]))
        text = self._chat.decode(answer["output_ids"])
        self.samples.setdefault(question, []).append(END_OF_TURN.sub("", text))

    async def start(self, seed: int) -> None:
        """Starts everything; returns after the first answers."""
        await super().start(seed)
        self._chat = Chat.from_hf(self.model)
        recipe = recipe_of(load_config(CONFIG, *SMOKE_SETTINGS, *SETTINGS))
        (self.model / RECIPE_FILE).write_bytes(recipe.to_bytes())
        self._keepers.append(asyncio.create_task(self._keep_service()))
        videos = sorted(path.name for path in self.videos.glob("*.mp4") if path.stem not in ("cut", "noise"))
        self._clients = [asyncio.create_task(self._ask_on(videos, number)) for number in range(NUM_CLIENTS)]
        self._keepers += self._clients
        await self.steps_more(1)

    def fronts(self) -> Sequence[asyncio.subprocess.Process]:
        return [] if self._service is None else [self._service]

    async def steps_more(self, number: int) -> None:
        """Waits for more steps; a step is one answer for each client."""
        goal = self.outcomes["answered"] + number * NUM_CLIENTS
        await self.until(lambda: self.outcomes["answered"] >= goal, "the service did not answer")

    async def inject(self, fault: Fault) -> bool:
        begin_s = time.monotonic()
        self._faults.append((fault, begin_s, begin_s + fault.lasts_s))
        return await super().inject(fault)

    async def finish(self) -> None:
        self._closing = True
        await asyncio.gather(*self._clients)
        await super().finish()

    async def _keep_service(self) -> None:
        urls = [word for url in self.urls for word in ("--url", url)]
        limits = ["--max-questions", str(MAX_QUESTIONS), "--deadline-s", str(DEADLINE_S)]
        command = [sys.executable, "-m", "paravt_jax.serve", "--model", str(self.model), "--port", str(self._port)]
        command += [*urls, *limits, "--video-root", str(self.videos)]
        while not self._closing:
            with (self.directory / "service.log").open("ab") as log:
                log_begin = log.tell()
                self._service = service = await self.run(command, stderr=log)
                code = await service.wait()
                self._listening = False
            lines = (self.directory / "service.log").read_bytes()[log_begin:].decode(errors="replace").splitlines()
            error = next((line for line in reversed(lines) if line.startswith(("error: ", "stopped again"))), "")
            self.exits.append(Exit(code, error))

    async def _ask_on(self, videos: Sequence[str], client: int) -> None:
        url = f"http://127.0.0.1:{self._port}/v1/chat/completions"
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            for turn in itertools.count(client):
                if self._closing:
                    return
                question = f"Question {next(self._numbers)}?"
                video = {"type": "video_url", "video_url": {"url": videos[turn % len(videos)]}}
                parts = [video, {"type": "text", "text": question}]
                body = {"model": str(self.model), "messages": [{"role": "user", "content": parts}], "temperature": 1.0}
                num_exits, listening = len(self.exits), self._listening
                asking = asyncio.create_task(_ask(session, url, body, question))
                if turn % LEAVES_EVERY == 0:
                    await asyncio.wait([asking], timeout=LEAVES_AFTER_S)
                    if asking.cancel():
                        self.outcomes["left"] += 1
                        await asyncio.gather(asking, return_exceptions=True)
                        continue
                request = await asking
                if request.status == 0 and not listening:
                    self.outcomes["not listening"] += 1
                else:
                    self._listening |= request.status > 0
                    await self._judge(request, num_exits)
                await asyncio.sleep(PAUSE_S)

    async def _judge(self, request: ClientRequest, num_exits: int) -> None:
        if request.status == 0:
            give_up_s = time.monotonic() + RESTART_S
            while len(self.exits) == num_exits and time.monotonic() < give_up_s and not self._closing:
                await asyncio.sleep(PAUSE_S)
        roles = {
            fault.role
            for fault, begin_s, end_s in self._faults
            if begin_s < request.end_s and request.begin_s < end_s + PAUSE_S
        }
        roles |= {SERVICE} if len(self.exits) > num_exits else set()
        outcome, problem = judged(request, self.samples.get(request.question, []), roles)
        self.outcomes[outcome] += 1
        if problem:
            self.violations.append(problem)


def question_in(text: str) -> str:
    match = re.search(r"Question \d+\?", text)
    return match.group() if match else ""


def judged(request: ClientRequest, samples: Sequence[str], disturbed: Set[str]) -> tuple[str, str]:
    """Returns a request's outcome, and a problem if the service must not respond this way.

    `samples` are the texts that servers sampled for its question; `disturbed` are the roles with a fault or exit during
    the request.
    """
    seconds = request.end_s - request.begin_s
    if seconds > DEADLINE_S + LATE_S:
        return "late", f"{request.question} had no response after {seconds:.0f} s"
    match request.status:
        case 200:
            return "answered", _problem_of_answer(request, samples)
        case 429 | 503 | 504:
            return REFUSALS[request.status], ""
        case 400 if disturbed & {"videos", "decoder"}:
            return "no video", ""
        case 0 if SERVICE in disturbed:
            return "connection lost", ""
        case 0:
            return "connection lost", f"{request.question} had no response, and the service did not end"
        case status:
            return str(status), f"{request.question} had the response {status}: {request.body[:SHOWN_CHARS]}"


def _problem_of_answer(request: ClientRequest, samples: Sequence[str]) -> str:
    try:
        (choice,) = json.loads(request.body)["choices"]
        text = choice["message"]["reasoning_content"]
    except (ValueError, KeyError, TypeError):
        return f"{request.question} had a response that is not an answer: {request.body[:SHOWN_CHARS]}"
    # The end of a forced prefix and the start of a sample may merge into one character.
    ends = [sample[-END_CHARS:] for sample in samples if sample]
    if not any(end in text for end in ends):
        return f"{request.question} had an answer that no server sampled for it: {text[-SHOWN_CHARS:]!r}"
    return ""


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], question: str) -> ClientRequest:
    begin_s, status, text = time.monotonic(), 0, ""
    with suppress(aiohttp.ClientError, OSError):
        async with asyncio.timeout(DEADLINE_S + LATE_S), session.post(url, json=body) as response:
            text, status = await response.text(), response.status
    return ClientRequest(question, begin_s, time.monotonic(), status, text)
