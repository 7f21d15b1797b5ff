"""The embedded engine on the devices of several hosts: each has requests of its own, and all sample those of all.

A program on devices of several hosts is started by all of them, in one order. So what is asked of the engine becomes an
order, and at every turn each host hears the orders of all, carries them out in one sequence, and samples on. A request
then has the tokens that it would have on one host. Pixels are told once, for as long as all keep their patches.
"""

import asyncio
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from model_port.inputs import Frame
from model_port.sampler import Completion
from paravt_jax.run.hosts import Hosts
from paravt_jax.run.wire import Form, Wire
from paravt_jax.sampling.embedded import EmbeddedEngine, Running
from rollout.engine.protocol import Request, RequestRejected, Sampling
from rollout.picture import Picture

IDLE_S = 0.05  # between two turns in which nothing is sampled


@dataclass(frozen=True, eq=False)
class _Order:
    """What a host asks of all: to sample a request that has this number there, or to end it."""

    number: int
    request: Request | None = None  # None: end it


class SharedEngine(EmbeddedEngine):
    """Turns go on from its beginning to its end on every host, also where one has nothing to ask."""

    def __init__(self, *args: Any, hosts: Hosts, **settings: Any):
        super().__init__(*args, **settings)
        self._hosts, self._leaving = hosts, threading.Event()
        self._orders: list[_Order] = []  # since the last turn; belongs to the thread, like what follows
        self._asked: dict[int, Running] = {}  # own requests, by their orders
        self._numbers: dict[tuple[int, int], int] = {}  # of host and order, the sampler's
        self._num_asked = 0
        self._pump = asyncio.create_task(self._sample())

    async def close(self) -> None:
        self._leaving.set()  # the others leave by themselves
        await super().close()

    async def _wait_for_work(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_S):
                await super()._wait_for_work()

    # In the thread

    def _submit(self, request: Request, running: Running) -> None:
        self._num_asked += 1
        running.order = self._num_asked
        self._asked[running.order] = running
        self._orders.append(_Order(running.order, replace(request, on_tokens=None)))

    def _stop(self, running: Running) -> Completion | None:
        """It ends at the next turn, with what it has by then."""
        if running.order in self._asked:
            self._orders.append(_Order(running.order))

    def _step(self) -> list[tuple[Running, Completion | Exception | None]]:
        orders, self._orders = self._orders, []
        told = self._hosts.gather("sampler", orders, self._wire(), self._leaving)
        self._keep_frames_of(order.request for of_host in told for order in of_host)
        ended = [self._carry_out(host, order) for host, of_host in enumerate(told) for order in of_host]
        ended += super()._step()
        own = [(running, completion) for running, completion in ended if running.done is not None]
        for running, completion in own:
            if completion is not None:
                self._asked.pop(running.order, None)
        self._numbers = {order: number for order, number in self._numbers.items() if self._sampler.has(number)}
        return own

    def _carry_out(self, host: int, order: _Order) -> tuple[Running, Completion | Exception | None]:
        """A request, and what it ended with if it did; one of another host is nobody's here."""
        own = self._asked.get(order.number) if host == self._hosts.index else None
        if order.request is None:
            return own or Running(""), self._end(self._numbers.pop((host, order.number), None))
        running = own or Running(order.request.episode)
        try:
            super()._submit(order.request, running)
        except RequestRejected as problem:
            return running, problem
        assert running.number is not None
        self._numbers[host, order.number] = running.number
        if own is None:
            del self._running[running.number]
        return running, None

    def _end(self, number: int | None) -> Completion | None:
        """What a request has; nothing where it had ended before."""
        if number is None or not self._sampler.has(number):
            return None
        self._running.pop(number, None)
        return self._sampler.abort(number)

    def _waiting(self) -> list[Running]:
        return list(self._asked.values())

    def _wire(self) -> Wire:
        """As all hosts have the same frames, only pixels that none has yet are sent."""
        sent: set[str] = set(self._frames)

        def take(picture: Picture) -> tuple[Any, ...]:
            if picture.key in sent:
                return picture.key, picture.size_px
            sent.add(picture.key)
            return picture.key, picture.pixels

        def make(key: str, there: Any) -> Picture:
            return Picture.without_pixels(key, there) if isinstance(there, tuple) else Picture(key, there)

        return Wire((_Order, Request, Sampling), {Picture: Form(take, make)})

    def _keep_frames_of(self, requests: Iterable[Request | None]) -> None:
        """What was told by name must not be forgotten for what comes with it."""
        for key in [picture.key for request in requests if request is not None for picture in request.pictures]:
            if key in self._frames:
                self._frames.move_to_end(key)

    def _frame(self, picture: Picture) -> Frame:
        assert picture.key in self._frames or picture.has_pixels, "a frame was forgotten before it was shown"
        return super()._frame(picture)
