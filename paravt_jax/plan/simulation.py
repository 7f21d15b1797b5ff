"""Steps of a run, simulated event by event: episodes on servers, beside the update, without a device.

What waits for what is that of the run itself: the turns of an episode and the sub-agents of a turn (`rollout.episode`),
a group's server and the idlest one (`rollout.engine.sglang`), a server that reads before it decodes, rollouts that
begin as many steps early as staleness allows (`rl.scheduler`), weights for which all servers pause. Only how long
things take is a model: see `plan.service`.
"""

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Any

from paravt_jax.plan.service import ServiceTimes
from rollout.engine.routing import MAX_IMBALANCE

SAME_S = 1e-9  # apart is at the same time, but for rounding
COUNTED_STEPS = 4  # whose mean counts, after those that fill the pipeline


@dataclass(frozen=True)
class CallScript:
    """A sub-agent: what it is shown and how long it speaks."""

    window: str  # equal ones have one prompt
    prompt_tokens: int  # frames included
    frames: int
    report_tokens: int


@dataclass(frozen=True)
class TurnScript:
    sampled_tokens: int
    read_tokens: int = 0  # since the turn before: tool responses, what is forced
    calls: tuple[CallScript, ...] = ()


@dataclass(frozen=True)
class GroupScript:
    """Episodes with one prompt, turn by turn."""

    name: str
    prompt_tokens: int  # frames included
    frames: int
    episodes: tuple[tuple[TurnScript, ...], ...]

    @property
    def sampled_tokens(self) -> int:
        turns = [turn for episode in self.episodes for turn in episode]
        return sum(turn.sampled_tokens + sum(call.report_tokens for call in turn.calls) for turn in turns)


@dataclass(frozen=True)
class StepTimes:
    """The mean over some steps of a run that goes on."""

    step_s: float
    rollout_s: float  # that the learner waits
    update_s: float
    publish_s: float
    busy_frac: float  # of the servers' time

    @property
    def bound_by(self) -> str:
        parts = {"the rollout": self.rollout_s, "the update": self.update_s, "publishing": self.publish_s}
        return max(parts, key=lambda part: parts[part])


class Signal:
    """Something that happens once, and may be waited for."""

    def __init__(self) -> None:
        self.fired = False
        self.waiting: list[Process] = []


@dataclass(frozen=True)
class Work:
    """Computing, and the share that it takes of what the learner computes on."""

    seconds: float
    share: float = 0.0


Process = Generator[Signal | Work, None, None]


class Clock:
    """Lets processes wait for signals and work. Work that shares goes slower as long as all of it wants more than 1.

    What shares has a clock of its own, which goes slower by as much: so of all work it is known from its beginning when
    it ends, and what ends next is the top of one of two heaps.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ready: deque[tuple[Process, Signal]] = deque()
        self._ends: dict[Process, Signal] = {}
        self._alone: list[tuple[float, int, Process]] = []  # by their end
        self._sharing: list[tuple[float, int, Process, float]] = []  # by their end on the clock of what shares
        self._shared_now_s = 0.0
        self._numbers = count()

    def start(self, process: Process) -> Signal:
        """Fires at the end of the process."""
        ended = self._ends[process] = Signal()
        self._ready.append((process, ended))
        return ended

    def fire(self, signal: Signal) -> None:
        signal.fired = True
        self._ready.extend((process, self._ends[process]) for process in signal.waiting)
        signal.waiting = []

    def run(self, until: Signal) -> None:
        while not until.fired:
            if self._ready:
                self._advance(*self._ready.popleft())
            elif self._alone or self._sharing:
                self._let_work()
            else:
                raise RuntimeError("the simulation stands still: everything waits")

    def _advance(self, process: Process, ended: Signal) -> None:
        for wanted in process:
            if isinstance(wanted, Work):
                self._begin(process, wanted)
                return
            if not wanted.fired:
                wanted.waiting.append(process)
                return
        del self._ends[process]
        self.fire(ended)

    def _begin(self, process: Process, work: Work) -> None:
        if work.share:
            end_s = self._shared_now_s + work.seconds
            heappush(self._sharing, (end_s, next(self._numbers), process, work.share))
        else:
            heappush(self._alone, (self.now_s + work.seconds, next(self._numbers), process))

    def _let_work(self) -> None:
        """Until the next work is done."""
        slowdown = max(1.0, sum(share for *_, share in self._sharing))
        alone_s = self._alone[0][0] - self.now_s if self._alone else math.inf
        shared_s = slowdown * (self._sharing[0][0] - self._shared_now_s) if self._sharing else math.inf
        seconds = max(0.0, min(alone_s, shared_s))
        self.now_s += seconds
        self._shared_now_s += seconds / slowdown
        done = [*_until(self._alone, self.now_s), *_until(self._sharing, self._shared_now_s)]
        self._ready.extend((process, self._ends[process]) for _, _, process, *_ in sorted(done, key=itemgetter(1)))


def _until(ends: list[Any], now_s: float) -> Iterator[Any]:
    """What has ended, off the heap."""
    while ends and ends[0][0] - now_s < SAME_S:
        yield heappop(ends)


@dataclass(eq=False)
class _SimulatedRequest:
    prompt: str  # others may have the same
    prompt_tokens: int
    frames: int
    dialogue: str  # nobody else has it
    dialogue_tokens: int
    sampled_tokens: int
    answered: Signal = field(default_factory=Signal)
    ends_at: int = 0  # tokens that the server has decoded by then, once it is read

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.dialogue_tokens

    @property
    def key(self) -> tuple[str, int]:
        """Equal where all that is read is."""
        return self.dialogue if self.dialogue_tokens else self.prompt, self.context_tokens


class SimulatedServer:
    """One server: reads what waits, one request after another, and decodes for all that it has read."""

    def __init__(self, clock: Clock, service: ServiceTimes, counted: "Callable[[SimulatedServer], object]") -> None:
        """`counted` is told whenever it has more or fewer requests."""
        self.service, self._counted = service, counted
        self.read_tokens = self.sampled_tokens = 0
        self.busy_s = 0.0
        self._clock = clock
        self._waiting: deque[_SimulatedRequest] = deque()
        self._running: list[tuple[int, int, _SimulatedRequest]] = []  # a heap by the end
        self._context_tokens = self._decoded = 0
        self._numbers = count()
        self._known: dict[str, int] = {}
        self._seen: set[str] = set()  # frames, which no new weights change
        self._last: tuple[str, int] | None = None
        self._asked = Signal()
        self._pause: Signal | None = None
        self._paused = Signal()
        clock.start(self._serve())

    @property
    def num_requests(self) -> int:
        return len(self._waiting) + len(self._running)

    def ask(self, request: _SimulatedRequest) -> Signal:
        self._waiting.append(request)
        self._counted(self)
        self._clock.fire(self._asked)
        return request.answered

    def pause(self) -> Signal:
        """Fires when what it is at is done; it waits then until `go_on`."""
        self._pause, self._paused = Signal(), Signal()
        self._clock.fire(self._asked)
        return self._paused

    def go_on(self) -> None:
        """With new weights: what it knew is of the old ones, and what runs is read again."""
        assert self._pause is not None
        self._known, self._last = {}, None
        if self.service.prefixes:
            self._waiting.extendleft(reversed([self._taken_back(request) for *_, request in sorted(self._running)]))
            self._running, self._context_tokens = [], 0
        pause, self._pause = self._pause, None
        self._clock.fire(pause)

    def _taken_back(self, request: _SimulatedRequest) -> _SimulatedRequest:
        left = request.ends_at - self._decoded
        request.dialogue_tokens += request.sampled_tokens - left
        request.sampled_tokens = left
        return request

    def _serve(self) -> Process:
        while True:
            if self._pause is not None:
                self._clock.fire(self._paused)
                yield self._pause
            elif self._waiting and len(self._running) < self.service.max_running:
                yield from self._read(self._waiting[0])
            elif self._running:
                yield from self._decode()
            else:
                self._asked = Signal()
                yield self._asked

    def _read(self, request: _SimulatedRequest) -> Process:
        """Gives the first token as well."""
        tokens, frames = self._new(request)
        seconds = self.service.read_s(tokens=tokens, frames=request.frames, unseen=frames)
        yield from self._work(seconds)
        self._waiting.popleft()
        self.read_tokens += tokens
        self.sampled_tokens += 1
        self._known[request.prompt] = request.prompt_tokens
        self._known[request.dialogue] = request.dialogue_tokens
        self._last = request.key
        self._seen.add(request.prompt)
        request.ends_at = self._decoded + request.sampled_tokens - 1
        self._context_tokens += request.context_tokens + 1
        heappush(self._running, (request.ends_at, next(self._numbers), request))
        self._answer()

    def _new(self, request: _SimulatedRequest) -> tuple[int, int]:
        """Tokens and frames that it has to compute."""
        if self.service.prefixes:
            known = self._known.get(request.prompt, 0)
            known += min(self._known.get(request.dialogue, 0), request.dialogue_tokens) if known else 0
            return request.context_tokens - known, 0 if request.prompt in self._seen else request.frames
        return (0, 0) if self._last == request.key else (request.context_tokens, request.frames)

    def _decode(self) -> Process:
        """A few tokens for every sequence; those that end on the way are answered afterwards."""
        stride, rows = self.service.stride, len(self._running)
        yield from self._work(stride * self.service.decoding_s(rows, self._context_tokens))
        for _ in range(stride):
            self._decoded += 1
            self.sampled_tokens += len(self._running)
            self._context_tokens += len(self._running)
            if self._running and self._running[0][0] <= self._decoded:
                self._answer()

    def _answer(self) -> None:
        while self._running and self._running[0][0] <= self._decoded:
            *_, request = heappop(self._running)
            self._counted(self)
            total = request.context_tokens + request.sampled_tokens
            self._context_tokens -= total
            self._known[request.dialogue] = total - request.prompt_tokens
            self._clock.fire(request.answered)

    def _work(self, seconds: float) -> Process:
        begun_s = self._clock.now_s
        yield Work(seconds, self.service.share)
        self.busy_s += self._clock.now_s - begun_s


class World:
    """Servers, and what is asked of them."""

    def __init__(self, service: ServiceTimes, num_servers: int) -> None:
        if num_servers < 1:
            raise ValueError(f"{num_servers} servers can answer nobody; at least 1 is needed")
        self.clock, self.service = Clock(), service
        self.servers = [SimulatedServer(self.clock, service, self._counted) for _ in range(num_servers)]
        self._places = {server: place for place, server in enumerate(self.servers)}
        self._loads = [(0, place) for place in range(num_servers)]  # a heap; the newest of a server counts
        self._homes: dict[str, SimulatedServer] = {}
        self._videos: dict[str, Signal] = {}  # frames that somebody has asked for

    def episode(self, group: GroupScript, name: str, turns: Sequence[TurnScript]) -> Process:
        yield from self._frames(group.name, group.frames)
        tokens = 0
        for number, turn in enumerate(turns):
            tokens += turn.read_tokens
            prompt = (group.name, group.prompt_tokens, group.frames)
            yield self._ask(_SimulatedRequest(*prompt, name, tokens, turn.sampled_tokens))
            tokens += turn.sampled_tokens
            yield from self.calls(turn.calls, f"{name}/{number}")

    def calls(self, calls: Sequence[CallScript], name: str) -> Process:
        """Those of a turn, at the same time."""
        yield from [self.clock.start(self._call(call, f"{name}/{n}")) for n, call in enumerate(calls)]

    def _call(self, call: CallScript, name: str) -> Process:
        yield from self._frames(call.window, call.frames)
        yield self._ask(_SimulatedRequest(call.window, call.prompt_tokens, call.frames, name, 0, call.report_tokens))

    def groups(self, groups: Sequence[GroupScript]) -> Process:
        """All episodes of a step."""
        yield from [
            self.clock.start(self.episode(group, f"{group.name}/{number}", turns))
            for group in groups
            for number, turns in enumerate(group.episodes)
        ]

    def publish(self) -> Process:
        yield from [server.pause() for server in self.servers]
        yield Work(self.service.publish_s, self.service.share)
        for server in self.servers:
            server.go_on()

    def _frames(self, name: str, num_frames: int) -> Process:
        """Once, however many ask."""
        if name not in self._videos:
            self._videos[name] = self.clock.start(self._decoded(num_frames))
        yield self._videos[name]

    def _decoded(self, num_frames: int) -> Process:
        yield Work(num_frames * self.service.decode_s, self.service.share)

    def _ask(self, request: _SimulatedRequest) -> Signal:
        """Of the server that knows the prompt, or of the idlest one."""
        idlest = self._idlest()
        home = self._homes.setdefault(request.prompt, idlest)
        return (home if home.num_requests <= idlest.num_requests + MAX_IMBALANCE else idlest).ask(request)

    def _idlest(self) -> SimulatedServer:
        while (server := self.servers[self._loads[0][1]]).num_requests != self._loads[0][0]:
            heappop(self._loads)
        return server

    def _counted(self, server: SimulatedServer) -> None:
        heappush(self._loads, (server.num_requests, self._places[server]))


@dataclass(frozen=True)
class _Marks:
    """When a step began, had its episodes, was learnt from and published; how long servers had been busy by then."""

    begun_s: float
    collected_s: float
    updated_s: float
    published_s: float
    busy_s: float


def simulate(
    groups_of: Callable[[int], Sequence[GroupScript]],
    service: ServiceTimes,
    *,
    num_servers: int = 1,
    update_s: float = 0.0,
    steps_ahead: int = 0,
) -> StepTimes:
    """A run with these groups in each of its steps, the first of which, that fill the pipeline, do not count."""
    world, marks = World(service, num_servers), []
    num_steps = 1 + COUNTED_STEPS + 2 * steps_ahead
    world.clock.run(world.clock.start(_train(world, groups_of, num_steps, update_s, steps_ahead, marks)))
    before, *counted = marks[steps_ahead : 1 + steps_ahead + COUNTED_STEPS]
    seconds = counted[-1].published_s - before.published_s
    return StepTimes(
        step_s=seconds / COUNTED_STEPS,
        rollout_s=sum(mark.collected_s - mark.begun_s for mark in counted) / COUNTED_STEPS,
        update_s=sum(mark.updated_s - mark.collected_s for mark in counted) / COUNTED_STEPS,
        publish_s=sum(mark.published_s - mark.updated_s for mark in counted) / COUNTED_STEPS,
        busy_frac=(counted[-1].busy_s - before.busy_s) / (num_servers * seconds),
    )


def _train(
    world: World,
    groups_of: Callable[[int], Sequence[GroupScript]],
    num_steps: int,
    update_s: float,
    steps_ahead: int,
    marks: list[_Marks],
) -> Process:
    clock, begun = world.clock, dict[int, Signal]()
    for step in range(num_steps):
        begun_s = clock.now_s
        for ahead in range(step, min(step + steps_ahead, num_steps - 1) + 1):
            if ahead not in begun:
                begun[ahead] = clock.start(world.groups(groups_of(ahead)))
        yield begun[step]
        collected_s = clock.now_s
        yield Work(update_s, share=1.0 if world.service.share else 0.0)
        updated_s = clock.now_s
        yield from world.publish()
        busy_s = sum(server.busy_s for server in world.servers)
        marks.append(_Marks(begun_s, collected_s, updated_s, clock.now_s, busy_s))


def reports_s(calls: Sequence[CallScript], service: ServiceTimes, num_servers: int = 1) -> float:
    """From the calls of a turn to the last report."""
    world = World(service, num_servers)
    world.clock.run(world.clock.start(world.calls(calls, "turn")))
    return world.clock.now_s
