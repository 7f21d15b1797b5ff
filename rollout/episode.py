"""One question about a video, from the overview to the answer: turns, parallel sub-agents, and what they cost.

The main agent's calls of a turn are carried out at the same time, each by its tool, most by a sub-agent: the same
policy in a fresh context with the frames that the call asks for. Whatever goes wrong with a call becomes its tool
response and its outcome, and its siblings do not notice. What goes wrong with the main agent's own request is raised:
such an episode is missing, not bad.
"""

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from rollout.chat import Chat
from rollout.engine.protocol import (
    DeadlineExceeded,
    Engine,
    EngineError,
    Generation,
    Request,
    RequestRejected,
    Sampling,
)
from rollout.ledger import Ledger
from rollout.prompter import Closeup, Frames, Overview, Prompter, ShownVideo, Task
from rollout.prompts import MAX_TEXT_CHARS, Prompts, prompts_of
from rollout.seeds import derived_seed
from rollout.threads import in_daemon_thread
from rollout.toolbox import Tool, ToolArgs, ToolContext, Videos, signatures, tools_of
from rollout.tools import CROP_VIDEO, MAX_CALLS, BadCall, Outcome, Signatures, ToolCall, Window, find_calls
from rollout.user_code import await_user_code
from rollout.video.box import Box
from rollout.video.reader import VideoError, VideoTimeout

Dispatch = Literal["parallel", "sequential", "none"]
TOKEN_PX = 32  # side of the square of a picture that is one token, in every Qwen3-VL
MIN_NEW_TOKENS = 16  # with less room than this in the context, a turn is not begun
MAX_ANSWER_CHARS = 8_000  # of what a tool says beside a report; no engine bounds it
MAX_TOKENS = 2**20  # four times the context of the published models
MOST = {  # of settings, which a model's own file may state: memory grows with them
    "max_turns": 1024,
    "max_parallel": MAX_CALLS,
    "max_new_tokens": MAX_TOKENS,
    "max_context_tokens": MAX_TOKENS,
    "subagent_new_tokens": MAX_TOKENS,
    "subagent_max_frames": 4096,
}


@dataclass(frozen=True)
class EpisodeConfig:
    """How an episode goes: turns, calls, what is sampled, how much is shown, and how long anything may take."""

    dispatch: Dispatch = "parallel"  # sequential: one call a turn and as many calls in all; none: no tool
    max_turns: int = 3  # turns with calls; one more follows to answer
    max_parallel: int = 5  # calls of a turn
    # that may be called: crop_video, zoom_frame, search_subtitles, or path/to/file.py:NAME of one's own
    tools: list[str] = field(default_factory=lambda: [CROP_VIDEO])
    forced_prefix: str = "<think>\n"  # begins every turn of the main agent, given and not sampled
    max_new_tokens: int = 2048  # of a turn
    max_context_tokens: int = 32_768  # of a dialogue, pictures included
    subagent_new_tokens: int = 512  # of a report
    subagent_max_frames: int = 16  # of the part of a video that a call looks at
    temperature: float = 0.7  # 0: always the likeliest token
    top_p: float = 1.0  # below 1: only the likeliest tokens that have this probability together
    turn_deadline_s: float = 600.0  # of the engine, for a turn; a call has half of it, a decoder a tenth or more
    prompts: Prompts = field(default_factory=Prompts)
    prompts_file: str = ""  # YAML with keys of prompts, in place of settings of them; empty: none

    def __post_init__(self) -> None:
        if self.prompts_file:
            object.__setattr__(self, "prompts", prompts_of(self.prompts_file, self.prompts))
        for name, most in MOST.items():
            if getattr(self, name) < 1:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at least 1")
            if getattr(self, name) > most:
                raise ValueError(f"rollout.{name}={getattr(self, name)} must be at most {most}")
        if len(self.forced_prefix) > MAX_TEXT_CHARS:
            raise ValueError(
                f"rollout.forced_prefix has {len(self.forced_prefix)} characters, more than {MAX_TEXT_CHARS}"
            )
        unsaid = [tool.spec.name for tool in self.toolbox if tool.spec.name not in self.prompts.system]
        if self.prompts.system_has_tools and self.dispatch == "none":
            raise ValueError(
                "rollout.dispatch=none offers no tool, but with rollout.prompts.system_has_tools=true the system text "
                "does; give a text without tools, or set system_has_tools=false"
            )
        if self.prompts.system_has_tools and unsaid:
            raise ValueError(
                f"rollout.tools has {', '.join(unsaid)}, of which rollout.prompts.system says nothing; with "
                f"rollout.prompts.system_has_tools=true that text must name every tool"
            )

    def check_samples(self) -> None:
        """What only matters where turns are sampled: a cold start uses the same settings, and samples nothing."""
        if self.max_context_tokens < self.max_new_tokens:
            raise ValueError(
                f"rollout.max_context_tokens={self.max_context_tokens} leaves no room for a turn of "
                f"rollout.max_new_tokens={self.max_new_tokens}"
            )

    @property
    def call_deadline_s(self) -> float:
        """Of a call: its frames and its report."""
        return self.turn_deadline_s / 2

    @property
    def min_video_deadline_s(self) -> float:
        """Of a decoder's job; many pixels or a large file extend it."""
        return self.turn_deadline_s / 10

    @property
    def toolbox(self) -> tuple[Tool, ...]:
        return tools_of(tuple(self.tools))

    @property
    def signatures(self) -> Signatures:
        """What may be called, as the calls in a text are read."""
        return signatures(self.toolbox)

    @property
    def detail_factor(self) -> int:
        """How many times the pixels of a frame one picture may have: a detail as many as all frames of a crop."""
        return self.subagent_max_frames if any(tool.shows_details for tool in self.toolbox) else 1

    @property
    def calls_per_turn(self) -> int:
        return {"parallel": self.max_parallel, "sequential": 1, "none": 0}[self.dispatch]

    def prompter(self, frames: Frames, chat: Chat) -> Prompter:
        return Prompter(
            frames,
            chat,
            self.prompts,
            calls_per_turn=self.calls_per_turn,
            subagent_max_frames=self.subagent_max_frames,
            deadline_s=self.min_video_deadline_s,
            tools=[tool.spec for tool in self.toolbox],
        )

    @property
    def tool_turns(self) -> int:
        """As many calls in all, whether they are made together or one by one."""
        return {"parallel": self.max_turns, "sequential": self.max_turns * self.max_parallel, "none": 0}[self.dispatch]


@dataclass(eq=False)
class Call:
    """A call as carried out. `report` is the sub-agent's ledger, where it came that far."""

    call: ToolCall
    outcome: Outcome
    response: str  # what the main agent is told
    problem: str = ""  # what went wrong, in words that are not for the model
    window: Window | None = None  # what it looked at, where it came that far
    box: Box | None = None
    report: Ledger | None = None
    latency_s: float = 0.0
    path: str = ""  # of the video that it looked at
    frames_s: tuple[float | int, ...] = ()  # when each frame begins that was shown to the sub-agent
    started_s: float = 0.0  # after the episode began

    def to_record(self) -> dict[str, Any]:
        return {
            "name": self.call.name,
            "span": self.call.span,
            "outcome": self.outcome,
            "response": self.response,
            "problem": self.problem,
            "window_s": None if self.window is None else [self.window.start_s, self.window.end_s],
            "box": self.box,
            "path": self.path,
            "frames_s": _rounded(self.frames_s),
            "started_s": round(self.started_s, 4),
            "latency_s": round(self.latency_s, 4),
            "segments": None if self.report is None else self.report.to_record(),
        }


@dataclass(eq=False)
class Turn:
    """What the assistant said in one turn, the forced prefix included and the token that ended it left out."""

    text: str
    finish: Literal["stop", "length", "abort"]
    token_span: tuple[int, int]  # in the ledger's ids, from the forced prefix to the last sampled token
    calls: list[Call] = field(default_factory=list)
    latency_s: float = 0.0
    started_s: float = 0.0  # after the episode began

    def to_record(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "finish": self.finish,
            "token_span": self.token_span,
            "started_s": round(self.started_s, 4),
            "latency_s": round(self.latency_s, 4),
            "calls": [call.to_record() for call in self.calls],
        }


@dataclass(eq=False)
class Episode:
    """One question from its overview to its answer, as far as it has come."""

    id: str
    task: Task
    ledger: Ledger
    turns: list[Turn] = field(default_factory=list)
    finish: Literal["done", "length", "context", "abort"] = "done"
    seconds: float = 0.0
    num_prompt_tokens: int = 0  # of all requests, pictures expanded
    num_cached_tokens: int = 0
    videos: tuple[ShownVideo, ...] = ()  # as the overview shows them
    overview_s: float = 0.0  # that it took, before the episode began; a group has one

    @property
    def calls(self) -> list[Call]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def outcomes(self) -> list[Outcome]:
        return [call.outcome for call in self.calls]

    @property
    def ledgers(self) -> list[Ledger]:
        """The main agent's, then those of its sub-agents in call order."""
        return [self.ledger, *(call.report for call in self.calls if call.report is not None)]

    @property
    def num_sampled(self) -> int:
        """Tokens of the policy so far, those of its sub-agents included."""
        return sum(ledger.num_sampled for ledger in self.ledgers)

    def to_record(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "task": self.task.id,
            "question": self.task.question,
            "frame_budget": self.task.frame_budget,
            "finish": self.finish,
            "seconds": round(self.seconds, 4),
            "overview_s": round(self.overview_s, 4),
            "videos": [asdict(video) | {"frames_s": _rounded(video.frames_s)} for video in self.videos],
            "segments": self.ledger.to_record(),
            "turns": [turn.to_record() for turn in self.turns],
        }


class EpisodeCallbacks:
    """Hears of an episode while it goes on, which waits for every one of these; of what it does not want, nothing."""

    wants_tokens = False  # whether `said` is to be told a turn's words as they are sampled

    def on_text(self, turn_number: int, text: str) -> None:
        """What the main agent has said of a turn so far."""

    def on_calls(self, turn: Turn, calls: Sequence[ToolCall]) -> None:
        """A turn is over and asks for these."""

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        """One of a turn's calls is carried out; its siblings may not be."""


class Agent:
    """Runs episodes of one engine over one source of frames."""

    def __init__(self, engine: Engine, frames: Frames, chat: Chat, config: EpisodeConfig | None = None):
        self.engine, self.frames, self.chat = engine, frames, chat
        self.config = config or EpisodeConfig()
        self.config.check_samples()
        self.prompter = self.config.prompter(frames, chat)
        self.tools = {tool.spec.name: tool for tool in self.config.toolbox}
        self.signatures = self.config.signatures
        self._forced = chat.encode(self.config.forced_prefix)

    def with_settings(self, **changed: Any) -> "Agent":
        """The same engine and frames, with other settings of the episode."""
        said = replace(self.config, prompts_file="", **changed)  # whatever has become of the file since
        return Agent(self.engine, self.frames, self.chat, said)

    async def overview(self, task: Task) -> Overview:
        return await self.prompter.overview(task)

    async def run(
        self,
        overview: Overview,
        number: int = 0,
        seed: int = 0,
        version: int | None = None,
        on_start: Callable[[Episode], object] = lambda episode: None,
        callbacks: EpisodeCallbacks | None = None,
        max_tokens: int | None = None,
    ) -> Episode:
        """One episode. `number` tells the members of a group apart; `version` demands that policy version throughout.
        At most `max_tokens` are sampled by the agent and its sub-agents together.

        Raises EngineError when the engine cannot continue the main agent. `on_start` gets the episode before its first
        turn: whoever keeps it has what there is of it, also when it is never ended.
        """
        started_s = time.monotonic()
        episode = Episode(
            f"{overview.task.id}/{number}",
            overview.task,
            Ledger(),
            videos=overview.shown,
            overview_s=overview.seconds,
        )
        on_start(episode)
        callbacks = callbacks or EpisodeCallbacks()
        left = sys.maxsize if max_tokens is None else max_tokens
        run = _EpisodeRun(self, overview, episode, seed, version, callbacks, started_s, left)
        episode.ledger.add("prompt", overview.ids, overview.pictures)
        for turn_number in range(self.config.tool_turns + 1):
            last = turn_number == self.config.tool_turns
            if run.tokens_left < 1:
                episode.finish = "length"
                break
            turn = await run.speak(turn_number)
            if turn is None:
                episode.finish = "context"
                break
            ends = last or turn.finish == "abort" or run.said_a_picture
            calls = [] if ends else find_calls(turn.text, self.signatures)
            if not calls:
                episode.finish = "done" if turn.finish == "stop" else turn.finish
                break
            callbacks.on_calls(turn, calls)
            turn.calls = await run.dispatch(calls, turn_number)
            # One more than can be made is told so; an answer to every further one would only fill the context.
            answered = turn.calls[: self.config.calls_per_turn + 1]
            if turn_number == self.config.tool_turns - 1:
                answered[-1].response += f"\n{self.config.prompts.last_turn.format()}"
            responses = self.chat.after_turn(episode.ledger.ids, [call.response for call in answered])
            if len(responses) > run.room(episode.ledger):
                episode.finish = "context"
                break
            episode.ledger.add("environment", responses)
        if episode.ledger.segments[-1].kind in ("forced", "sampled"):
            episode.ledger.add("environment", self.chat.after_last_turn(episode.ledger.ids))
        episode.seconds = time.monotonic() - started_s
        return episode


@dataclass(eq=False)
class _EpisodeRun:
    """The state of one episode while it runs."""

    agent: Agent
    overview: Overview
    episode: Episode
    seed: int
    version: int | None
    callbacks: EpisodeCallbacks
    began_s: float
    tokens_left: int  # that may be sampled, by the sub-agents too
    share: int = 0  # of them, for each sub-agent of this turn: as much is left for what follows
    sampled_image_token: bool = False  # a placeholder was sampled, which no engine takes back as a token

    def now_s(self) -> float:
        """Since the episode began."""
        return time.monotonic() - self.began_s

    def room(self, ledger: Ledger) -> int:
        """Tokens that a dialogue may still grow by."""
        config = self.agent.config
        used = ledger.num_tokens_each(self.agent.chat.image_id, TOKEN_PX)
        return config.max_context_tokens - int(used.sum())

    async def speak(self, turn_number: int) -> Turn | None:
        """The main agent's next turn, or None when its context is full."""
        config, chat, ledger = self.agent.config, self.agent.chat, self.episode.ledger
        forced = self.agent._forced
        room = self.room(ledger) - len(forced)
        if room < min(MIN_NEW_TOKENS, config.max_new_tokens):
            return None
        begin, started_s = len(ledger.ids), self.now_s()
        ledger.add("forced", forced)
        stop_ids = chat.stop_ids if config.dispatch != "sequential" else (*chat.stop_ids, chat.call_end_id)
        generation = await self._generate(
            ledger,
            min(config.max_new_tokens, room),
            config.turn_deadline_s,
            turn_number,
            stop_ids=stop_ids,
            affinity=self.overview.task.id,
            on_tokens=self._on_tokens(turn_number) if self.callbacks.wants_tokens else None,
        )
        ledger.add_sampled(generation)
        self.said_a_picture = not chat.visual_ids.isdisjoint(generation.ids.tolist())
        turn = Turn(
            chat.decode([*forced, *self._spoken(generation)]),
            generation.finish,
            (begin, len(ledger.ids)),
            latency_s=generation.latency_s,
            started_s=started_s,
        )
        self.episode.turns.append(turn)
        return turn

    def _on_tokens(self, turn_number: int) -> Callable[[Sequence[int]], None]:
        def on_tokens(ids: Sequence[int]) -> None:
            spoken = ids[:-1] if ids and ids[-1] in self.agent.chat.stop_ids else ids
            self.callbacks.on_text(turn_number, self.agent.chat.decode([*self.agent._forced, *spoken]))

        return on_tokens

    async def dispatch(self, calls: list[ToolCall], turn_number: int) -> list[Call]:
        """Carries out the calls of a turn at the same time; the results are in call order."""
        self.share = self.tokens_left // (min(len(calls), self.agent.config.calls_per_turn) + 1)
        return await asyncio.gather(*(self._carry_out(call, turn_number, number) for number, call in enumerate(calls)))

    async def _carry_out(self, call: ToolCall, turn_number: int, number: int) -> Call:
        result = Call(call, "error", "", started_s=self.now_s())
        tool = self.agent.tools.get(call.name, Tool())
        try:
            async with asyncio.timeout(self.agent.config.call_deadline_s):
                result.response = await await_user_code(self._answer(tool, result, turn_number, number))
            result.outcome = "ok"
        except BadCall as problem:
            self._fail(result, problem.outcome, str(problem), problem)
        except (TimeoutError, VideoTimeout, DeadlineExceeded) as problem:
            self._fail(result, "timeout", tool.timeout_message, problem)
        except VideoError as problem:
            self._fail(result, "error", str(problem), problem)
        except Exception as problem:  # whatever it is, it is this call's
            self._fail(result, "error", tool.failure_message, problem)
        result.latency_s = self.now_s() - result.started_s
        self.callbacks.on_result(turn_number, number, result)
        return result

    async def _answer(self, tool: Tool, result: Call, turn_number: int, number: int) -> str:
        config, overview = self.agent.config, self.overview
        if number >= config.calls_per_turn:
            raise BadCall(f"only {config.calls_per_turn} calls can be made in one turn")
        if result.call.problem is not None:
            raise result.call.problem
        subtitles = dict(zip(overview.task.videos, overview.task.subtitles, strict=False))
        videos = Videos(overview.videos, overview.names, subtitles)
        args = tool.check(result.call.arguments, videos)
        result.path, result.window, result.box = args.path, args.window, args.box
        reports: list[str] = []

        async def ask(closeup: Closeup, about: str) -> str:
            reports.append(await self._report(result, closeup, about, turn_number, number))
            return reports[-1]

        context = ToolContext(overview.task.question, videos, self.agent.prompter, ask)
        answer = await _carried_out(tool, args, context)
        if not isinstance(answer, str):
            raise TypeError(f"{result.call.name} gave {type(answer).__name__}, expected text")
        return _cut(answer, MAX_ANSWER_CHARS + sum(map(len, reports)))

    async def _report(self, result: Call, closeup: Closeup, about: str, turn_number: int, number: int) -> str:
        """A sub-agent's report on what it is shown. `about` is equal where several members of a group look at it."""
        agent, config = self.agent, self.agent.config
        if result.report is not None:
            raise RuntimeError(f"{result.call.name} asked for a second report, a call has one")
        result.report, result.frames_s = (report := Ledger()), closeup.frames_s
        report.add("prompt", closeup.ids, closeup.pictures)
        room = self.room(report)
        if room < min(MIN_NEW_TOKENS, config.subagent_new_tokens):
            raise RequestRejected(f"the frames of call {number} leave {room} tokens of the context for a report")
        generation = await self._generate(
            report,
            min(config.subagent_new_tokens, room, self.share),
            config.call_deadline_s,
            turn_number,
            number + 1,
            stop_ids=agent.chat.stop_ids,
            affinity=about,
        )
        report.add_sampled(generation)
        if generation.finish == "abort":
            raise EngineError(f"the request of call {number} was aborted")
        return agent.chat.decode(self._spoken(generation)).strip()

    async def _generate(
        self,
        ledger: Ledger,
        max_new_tokens: int,
        deadline_s: float,
        turn_number: int,
        agent_number: int = 0,
        *,
        stop_ids: tuple[int, ...],
        affinity: str,
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        """`agent_number` 0 is the main agent, n the sub-agent of a turn's n-th call.

        What a group begins with, and what several of its members look at, is computed by one server.
        """
        config = self.agent.config
        num_tokens = min(max_new_tokens, self.tokens_left)
        if num_tokens < 1:
            raise RequestRejected("the episode has sampled as many tokens as it may")
        self.tokens_left -= num_tokens  # of those that run beside it
        generation = await self.agent.engine.generate(
            Request(
                ids=ledger.ids,
                pictures=ledger.pictures,
                sampling=Sampling(
                    num_tokens,
                    config.temperature,
                    config.top_p,
                    stop_ids=stop_ids,
                    seed=derived_seed(self.seed, self.episode.id, turn_number, agent_number),
                ),
                episode=self.episode.id,
                deadline_s=deadline_s,
                version=self.version,
                affinity=affinity,
                on_tokens=on_tokens,
            )
        )
        self.tokens_left += num_tokens - len(generation.ids)
        self.episode.num_prompt_tokens += generation.num_prompt_tokens
        self.episode.num_cached_tokens += generation.num_cached_tokens
        return generation

    def _spoken(self, generation: Generation) -> np.ndarray:
        """Without the token that ended the turn."""
        ended = len(generation.ids) > 0 and int(generation.ids[-1]) in self.agent.chat.stop_ids
        return generation.ids[:-1] if ended else generation.ids

    def _fail(self, result: Call, outcome: Outcome, message: str, problem: BaseException) -> None:
        result.outcome, result.problem = outcome, _cut(f"{type(problem).__name__}: {problem}", MAX_ANSWER_CHARS)
        result.response = f"Error: {_cut(message, MAX_ANSWER_CHARS)}."


def _rounded(times_s: Sequence[float | int]) -> list[float]:
    return [round(float(time_s), 6) for time_s in times_s]


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


async def _carried_out(tool: Tool, args: ToolArgs, context: ToolContext) -> str:
    """A tool that does not wait as others in the event loop do is given a thread of its own."""
    if inspect.iscoroutinefunction(tool.run):
        answer = tool.run(args, context)
    else:
        answer = await in_daemon_thread(lambda: tool.run(args, context))
    return await answer if isinstance(answer, Awaitable) else answer
