"""Runs an episode: a question about a video, answered in turns with parallel tool calls.

The calls of a turn run concurrently. Most tools run a sub-agent: the same policy in a fresh context, with the frames
that the call asks for. A failed call only affects its own response and outcome. If a request of the main agent fails,
the episode raises an error, so that it counts as missing, not as a bad answer.
"""

import asyncio
import inspect
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from rollout.chat import Chat
from rollout.dialogue import AgentDialogue, SampledTurn, TokenDialogue, TurnRequest
from rollout.engine.protocol import DeadlineExceeded, Engine, EngineError, Health, RequestRejected
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.parts import Part, Response, cut, pictures_of, text_of
from rollout.prompter import Closeup, Frames, Overview, PromptEncoder, Task
from rollout.records import Call, Episode, Turn
from rollout.responses import checked_response
from rollout.seeds import derived_seed
from rollout.threads import in_daemon_thread
from rollout.toolbox import Tool, ToolArgs, ToolContext, Videos, signatures
from rollout.tools import BadCall, Outcome, ToolCall, find_calls
from rollout.user_code import await_user_code
from rollout.video.errors import VideoError, VideoTimeout

MIN_NEW_TOKENS = 16  # a turn needs at least this many tokens of context
MAX_ANSWER_CHARS = 8_000  # in a tool's response, besides reports, whose length the engine bounds


class EpisodeCallbacks:
    """Callbacks of a running episode. Override them to follow its progress; the episode waits for each call."""

    wants_tokens = False  # True: `on_text` is called while a turn is sampled

    def on_text(self, turn_number: int, text: str) -> None:
        """Receives the main agent's text of the current turn so far."""

    def on_calls(self, turn: Turn, calls: Sequence[ToolCall]) -> None:
        """Receives the calls of a turn when it has ended."""

    def on_result(self, turn_number: int, number: int, call: Call) -> None:
        """Receives a finished call: at once, or after all calls of the turn if its response has pictures."""


class Agent:
    """Runs episodes with an engine and a source of frames, for example a `FrameReader`."""

    top_p: float | int = 1.0  # training needs 1, the whole distribution; other values are for answering questions

    def __init__(self, engine: Engine, frames: Frames, chat: Chat, config: EpisodeConfig | None = None):
        self._set_up(frames, chat, config)
        self.engine, self.chat = engine, chat

    def _set_up(self, frames: Frames, texts: PromptEncoder, config: EpisodeConfig | None) -> None:
        self.frames, self._texts = frames, texts
        config = config or EpisodeConfig()
        self._use(config, config.toolbox)

    def _use(self, config: EpisodeConfig, tools: Sequence[Tool]) -> None:
        config.check_samples()
        config.check_tools(tools)
        self.config = config
        self.prompter = config.prompter(self.frames, self._texts, tools)
        self.tools = {tool.spec.name: tool for tool in tools}
        self.signatures = signatures(tools)

    def with_config(self, config: EpisodeConfig) -> Self:
        """Returns an agent with the same engine and frames, but other settings. Equal tools are not loaded again."""
        agent, own = copy(self), self.config
        keeps_tools = (config.tools, config.crop_returns) == (own.tools, own.crop_returns)
        agent._use(config, [*self.tools.values()] if keeps_tools else config.toolbox)
        return agent

    async def health(self) -> Health:
        return await self.engine.health()

    def with_settings(self, **changed: Any) -> Self:
        """Like `with_config`, but changes only these settings."""
        return self.with_config(replace(self.config, **changed))

    def dialogue(
        self, prompt: Overview | Closeup, ledger: Ledger, *, episode: str, version: int | None, forced: str = ""
    ) -> AgentDialogue:
        """Starts a dialogue with this prompt; `ledger` records it."""
        dialogue = partial(TokenDialogue, self.engine, self.chat, self.config, ledger, prompt)
        return dialogue(episode=episode, version=version, forced=forced, top_p=self.top_p)

    async def overview(self, task: Task) -> Overview:
        """Decodes a task's frames and renders its prompt. Raises a VideoError if a video cannot be read."""
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
        seed_name: str | None = None,
    ) -> Episode:
        """Runs an episode. Raises EngineError if the engine cannot continue the main agent.

        `number` is the episode's index in its group. All tokens must have the policy version `version`, if given. The
        seeds of requests are derived from `seed` and `seed_name` (default: the episode's id). The agent and its
        sub-agents together sample at most `max_tokens`. `on_start` receives the episode before its first turn, so the
        caller can read the turns so far if the episode fails.
        """
        started_s = time.monotonic()
        episode = Episode(
            f"{overview.task.id}/{number}",
            overview.task,
            Ledger(),
            videos=overview.shown_videos,
            overview_s=overview.seconds,
        )
        on_start(episode)
        callbacks = callbacks or EpisodeCallbacks()
        budget = sys.maxsize if max_tokens is None else max_tokens
        seeds = (seed, seed_name or episode.id)
        await _EpisodeRun(self, overview, episode, seeds, version, callbacks, started_s, budget).run()
        episode.seconds = time.monotonic() - started_s
        return episode


@dataclass(eq=False)
class _EpisodeRun:
    """The state of a running episode."""

    agent: Agent
    overview: Overview
    episode: Episode
    seeds: tuple[int, str]  # the parts that all request seeds are derived from
    version: int | None
    callbacks: EpisodeCallbacks
    began_s: float
    tokens_left: int  # tokens that the agent and its sub-agents may still sample
    subagent_budget: int = 0  # tokens for each sub-agent of this turn; the same amount remains for later turns

    async def run(self) -> None:
        config = self.agent.config
        tool_turns = config.tool_turns if self.overview.task.videos else 0
        dialogue = self._dialogue(self.overview, self.episode.ledger, config.forced_prefix)
        for turn_number in range(tool_turns + 1):
            is_last = turn_number == tool_turns
            if self.tokens_left < 1:
                self.episode.finish = "length"
                break
            sampled = await self.sample_turn(dialogue, turn_number)
            if sampled is None:
                self.episode.finish = "context"
                break
            turn = sampled.turn
            ends = is_last or turn.finish == "abort" or not sampled.can_continue
            calls = [] if ends else find_calls(turn.text, self.agent.signatures)
            if not calls:
                self.episode.finish = "done" if turn.finish == "stop" else turn.finish
                break
            self.callbacks.on_calls(turn, calls)
            turn.calls = await self.run_calls(calls, turn_number)
            # Only the first call beyond the limit gets an error, because more errors would only fill the context.
            answered = turn.calls[: config.calls_per_turn + 1]
            self.check_room(answered, dialogue, turn_number)
            if turn_number == tool_turns - 1 and config.prompts.last_turn:
                answered[-1].respond(*answered[-1].content, f"\n{config.prompts.last_turn.format()}")
            if not dialogue.respond([call.content for call in answered]):
                self.episode.finish = "context"
                break

    def _dialogue(self, prompt: Overview | Closeup, ledger: Ledger, forced: str = "") -> AgentDialogue:
        return self.agent.dialogue(prompt, ledger, episode=self.episode.id, version=self.version, forced=forced)

    def now_s(self) -> float:
        """Seconds since the start of the episode."""
        return time.monotonic() - self.began_s

    def check_room(self, calls: Sequence[Call], dialogue: AgentDialogue, turn_number: int) -> None:
        """Fails calls whose pictures do not fit, then reports all calls with pictures, which had to wait for this."""
        with_pictures = [number for number, call in enumerate(calls) if call.parts]
        if with_pictures:
            self.fail_too_long(calls, dialogue)
        for number in with_pictures:
            self.callbacks.on_result(turn_number, number, calls[number])

    def fail_too_long(self, calls: Sequence[Call], dialogue: AgentDialogue) -> None:
        """Fails each call, in order, whose pictures would leave no room for another turn. Others are unaffected."""
        room = dialogue.room - self.agent.config.max_new_tokens
        responses = [(text_of(call.content),) if call.parts else call.content for call in calls]
        for number, call in enumerate(calls):
            with_pictures = [*responses[:number], call.content, *responses[number + 1 :]]
            if not call.parts or dialogue.num_tokens(with_pictures) <= room:
                responses = with_pictures
                continue
            left = max(0, room - dialogue.num_tokens(responses))
            num_tokens = sum(picture.num_tokens(dialogue.token_px) for picture in pictures_of(call.parts))
            message = f"the pictures of this call need {num_tokens} tokens of the context, which has {left} left"
            _fail(call, "error", message, RequestRejected(message))
            responses[number] = call.content

    async def sample_turn(self, dialogue: AgentDialogue, turn_number: int) -> SampledTurn | None:
        """Samples the main agent's next turn. Returns None if its context is full."""
        config, room = self.agent.config, dialogue.room
        if room < min(MIN_NEW_TOKENS, config.max_new_tokens):
            return None
        started_s = self.now_s()
        sampled = await self._sample(
            dialogue,
            min(config.max_new_tokens, room),
            config.turn_deadline_s,
            turn_number,
            affinity=self.overview.task.id,
            ends_after_call=config.dispatch == "sequential",
            on_text=partial(self.callbacks.on_text, turn_number) if self.callbacks.wants_tokens else None,
        )
        sampled.turn.started_s = started_s
        self.episode.turns.append(sampled.turn)
        return sampled

    async def run_calls(self, calls: list[ToolCall], turn_number: int) -> list[Call]:
        """Runs the calls of a turn concurrently; the results are in call order."""
        self.subagent_budget = self.tokens_left // (min(len(calls), self.agent.config.calls_per_turn) + 1)
        return await asyncio.gather(*(self._run_call(call, turn_number, number) for number, call in enumerate(calls)))

    async def _run_call(self, call: ToolCall, turn_number: int, number: int) -> Call:
        result = Call(call, "error", "", started_s=self.now_s())
        tool = self.agent.tools.get(call.name, Tool())
        try:
            async with asyncio.timeout(self.agent.config.call_deadline_s):
                result.respond(*await await_user_code(self._respond(tool, result, turn_number, number)))
            result.outcome = "ok"
        except BadCall as problem:
            _fail(result, problem.outcome, str(problem), problem)
        except (TimeoutError, VideoTimeout, DeadlineExceeded) as problem:
            _fail(result, "timeout", tool.timeout_message, problem)
        except VideoError as problem:
            _fail(result, "error", str(problem), problem)
        except Exception as problem:  # a failure of a tool only affects its own call
            _fail(result, "error", tool.failure_message, problem)
        result.latency_s = self.now_s() - result.started_s
        if not result.parts:
            self.callbacks.on_result(turn_number, number, result)
        return result

    async def _respond(self, tool: Tool, result: Call, turn_number: int, number: int) -> Sequence[Part]:
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

        async def ask(closeup: Closeup, affinity: str) -> str:
            reports.append(await self._report(result, closeup, affinity, turn_number, number))
            return reports[-1]

        context = ToolContext(overview.task.question, videos, self.agent.prompter, ask)
        response = await _run_tool(tool, args, context)
        max_chars = MAX_ANSWER_CHARS + sum(map(len, reports))
        return await checked_response(response, tool, config, self.agent.frames, max_chars)

    async def _report(self, result: Call, closeup: Closeup, affinity: str, turn_number: int, number: int) -> str:
        """Samples a sub-agent's report. `affinity` is equal for episodes of a group that look at the same frames."""
        config = self.agent.config
        if result.report is not None:
            raise RuntimeError(f"{result.call.name} asked for a second report, but a call may have only one")
        result.report, result.seen, result.frames_s = (report := Ledger()), closeup.frames, closeup.frames_s
        dialogue = self._dialogue(closeup, report)
        if dialogue.room < min(MIN_NEW_TOKENS, config.subagent_new_tokens):
            raise RequestRejected(
                f"the frames of call {number} leave {dialogue.room} tokens of the context for a report"
            )
        sampled = await self._sample(
            dialogue,
            min(config.subagent_new_tokens, dialogue.room, self.subagent_budget),
            config.call_deadline_s,
            turn_number,
            number + 1,
            affinity=affinity,
        )
        if sampled.turn.finish == "abort":
            raise EngineError(f"the request of call {number} was aborted")
        return sampled.turn.text.strip()

    async def _sample(
        self,
        dialogue: AgentDialogue,
        max_new_tokens: int,
        deadline_s: float,
        turn_number: int,
        agent_number: int = 0,
        **request: Any,
    ) -> SampledTurn:
        """Samples a turn. `agent_number` is 0 for the main agent and n for the sub-agent of a turn's n-th call."""
        num_tokens = min(max_new_tokens, self.tokens_left)
        if num_tokens < 1:
            raise RequestRejected("the episode has no tokens left to sample")
        self.tokens_left -= num_tokens  # reserves the tokens, because other requests run concurrently
        seed = derived_seed(*self.seeds, turn_number, agent_number)
        sampled = await dialogue.sample(TurnRequest(num_tokens, seed, deadline_s, **request))
        self.tokens_left += num_tokens - sampled.num_tokens
        self.episode.num_prompt_tokens += sampled.num_prompt_tokens
        self.episode.num_cached_tokens += sampled.num_cached_tokens
        return sampled


def _fail(result: Call, outcome: Outcome, message: str, problem: BaseException) -> None:
    result.outcome, result.problem = outcome, cut(f"{type(problem).__name__}: {problem}", MAX_ANSWER_CHARS)
    result.respond(f"Error: {cut(message, MAX_ANSWER_CHARS)}.")


async def _run_tool(tool: Tool, args: ToolArgs, context: ToolContext) -> Response:
    """Runs a tool; a synchronous tool runs in a thread, so that it cannot block the event loop."""
    if inspect.iscoroutinefunction(tool.run):
        response = tool.run(args, context)
    else:
        response = await in_daemon_thread(lambda: tool.run(args, context))
    return await response if isinstance(response, Awaitable) else response
