"""The hosts of a run: which one this is, what they tell each other, and how the end of one is the end of all.

Every host runs the same program on its part of the mesh, and host 0 alone writes what a run leaves. What must be equal
everywhere is told by `gather`. It goes through the store of jax's coordinator and not through the devices: so hosts may
speak while theirs compute, nobody waits without noticing who is late, and what is said has no shape. On one host
everything here gives back what it is given.
"""

import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

from model_port.cli import DEBUG_FLAG, FAILED, one_line
from model_port.terminal import say
from paravt_jax.config import AUTO, HostsConfig
from paravt_jax.run import coordinator
from paravt_jax.run.relay import port_that_leads_to
from paravt_jax.run.wire import PLAIN, Wire, WireError

Value = TypeVar("Value")
JOIN_S = 300.0  # for all hosts to be there
PORT_S = 75.0  # for the port to be free: longer than the coordinator of a run that was killed stays
BEAT_S = 1.0
LOST_S = 30.0  # without a beat a host is taken for dead: longer than any call that holds Python's lock
LATE_S = 60.0  # after which it is said for whom the others wait; then twice as long
SLICE_MS = 1000  # of waiting, between two looks at whether anybody still waits
TOLD_S = 3.0  # for the others to hear why host 0 ends: the coordinator may end with it
OWN_WORDS_S = 5.0  # for a host to say itself what all hosts find wrong
MAX_WAITING = 64  # threads that wait for other hosts
SHOWN = 3  # of what differs


class Hosts:
    """All hosts of a run, as one of them sees them."""

    def __init__(self, index: int = 0, num: int = 1, store: Any = None):
        """`store` is the client of jax's coordinator; one host needs none."""
        self.index, self.num, self.store = index, num, store
        self.names: list[str] = []
        self._turns: dict[str, int] = {}
        self._waiting = ThreadPoolExecutor(MAX_WAITING, thread_name_prefix="hosts")
        self._on_stop: Callable[[int], object] = lambda number: None
        self.stopped_by = 0  # the signal that asked all hosts to stop

    @property
    def leads(self) -> bool:
        """Whether this is host 0, which writes and decides for all."""
        return self.index == 0

    def gather(
        self, stream: str, value: Value, wire: Wire = PLAIN, unless: threading.Event | None = None
    ) -> list[Value]:
        """The values of all hosts at their next turn of this stream, in host order. `unless` ends the wait."""
        if self.num == 1:
            return [value]
        turn = self._turns[stream] = self._turns.get(stream, -1) + 1
        self.store.key_value_set_bytes(_key(stream, turn, self.index), wire.encode(value))
        said = [
            value if host == self.index else self._decoded(stream, turn, host, wire, unless) for host in range(self.num)
        ]
        if turn:  # everybody is at this one, so everybody has heard the one before
            self.store.key_value_delete(_key(stream, turn - 1, self.index))
        return said

    async def gathered(self, stream: str, value: Value, wire: Wire = PLAIN) -> list[Value]:
        """The same beside the event loop; when it is cancelled, nobody waits any more."""
        if self.num == 1:
            return [value]
        unless = threading.Event()
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._waiting, self.gather, stream, value, wire, unless)
        finally:
            unless.set()

    def first(self, work: Callable[[], Value]) -> Value:
        """Work on what all hosts see: host 0 does it, then the others find it done."""
        done = [work()] if self.leads else []
        self.gather("first", None)
        return done[0] if done else work()

    def check_same(self, what: Callable[[], Mapping[str, Any]], mend: str) -> None:
        """Raises on every host where two of them have something else by one name; `mend` says what to do."""
        if self.num == 1:
            return
        ours, *others = self.gather("same", dict(what()))
        for host, theirs in enumerate(others, 1):
            differ = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            if differ:
                shown = [f"{name} is {theirs.get(name)} there and {ours.get(name)} here" for name in differ[:SHOWN]]
                more = f", and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
                raise ValueError(f"{self.name_of(host)} is not as {self.name_of(0)}: {'; '.join(shown)}{more}; {mend}")

    def name_of(self, host: int) -> str:
        return f"host {host} ({self.names[host]})" if host < len(self.names) else f"host {host}"

    def stop_all(self, number: int) -> None:
        """Asks every host to stop, as this one was asked by a signal."""
        if self.num > 1:
            self.store.key_value_set(f"stop/{self.index}", str(int(number)), allow_overwrite=True)

    def when_stopped(self, work: Callable[[int], object]) -> None:
        """`work` gets the number of the signal, in another thread, once a host was asked to stop."""
        self._on_stop = work
        if self.stopped_by:
            work(self.stopped_by)

    def stop(self, number: int) -> None:
        """What the watch does when it hears of that."""
        if not self.stopped_by:
            self.stopped_by = number
            self._on_stop(number)

    def _decoded(self, stream: str, turn: int, host: int, wire: Wire, unless: threading.Event | None) -> Any:
        data = self._heard(stream, turn, host, unless)
        try:
            return wire.decode(data)
        except WireError as problem:
            raise RuntimeError(
                f"at the coordinator the value {stream!r} of {self.name_of(host)} is not one that a host sends "
                f"({problem}); let a firewall admit only the hosts of the run to its port"
            ) from None

    def _heard(self, stream: str, turn: int, host: int, unless: threading.Event | None) -> bytes:
        began_s, late_s = time.monotonic(), LATE_S
        while unless is None or not unless.is_set():
            try:
                return self.store.blocking_key_value_get_bytes(_key(stream, turn, host), SLICE_MS)
            except RuntimeError as problem:
                if "DEADLINE_EXCEEDED" not in str(problem):
                    raise
            if (waited_s := time.monotonic() - began_s) > late_s:
                say(f"{self.name_of(host)} is {waited_s:.0f} s later than this one at {stream!r}")
                late_s *= 2
        raise RuntimeError(f"nobody waits for {stream!r} any more")


ALONE = Hosts()


@contextmanager
def joined(config: HostsConfig) -> Iterator[Hosts]:
    """The hosts of a run, joined until the body ends. An error of one host is said by it, and ends all of them.

    Before anything that asks jax for a device.
    """
    if not config.coordinator:
        yield ALONE
        return
    service: subprocess.Popen[str] | None = None
    hosts: Hosts | None = None
    left = threading.Event()
    try:
        address, num, index = _place(config)
        if index == 0:
            service = _coordinator(address, num)
        hosts = Hosts(index, num, _connected(address, num, index))
        heard = Heard()
        beat, watch = (
            threading.Thread(target=work, args=(hosts, heard, left), name="watch over hosts", daemon=True)
            for work in (_beat, _watch)
        )
        beat.start()
        watch.start()
        hosts.names = hosts.gather("names", socket.gethostname())
        yield hosts
        hosts.gather("end", None)
    except BaseException as problem:
        _end(hosts, problem)
    left.set()
    beat.join(LOST_S)
    _leave()
    if service is not None:
        service.communicate(f"{coordinator.DONE}\n")


def _place(config: HostsConfig) -> tuple[str, int, int]:
    """The coordinator's address, how many hosts there are, and which one this is."""
    if config.coordinator != AUTO:
        return config.coordinator, config.num, config.index
    from jax._src.clusters import ClusterEnv

    address, num, index, _ = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(JOIN_S))
    if address is None or num is None or index is None:
        raise ValueError(
            f"hosts.coordinator={AUTO}, and neither Slurm nor a TPU pod nor Kubernetes says which hosts there are; "
            f"give hosts.coordinator=ADDRESS:PORT, hosts.num and hosts.index"
        )
    return address, num, index


def _coordinator(address: str, num: int) -> subprocess.Popen[str]:
    """The process that all hosts meet at, which stays for a while when this one is killed."""
    port, give_up_s = address.rpartition(":")[2], time.monotonic() + PORT_S
    while True:
        try:
            socket.create_server(("", int(port))).close()
            break
        except OSError as problem:
            if time.monotonic() > give_up_s:
                why = os.strerror(problem.errno or 0)
                raise RuntimeError(
                    f"hosts.coordinator={address}: port {port} of host 0 cannot be had ({why}); choose another one"
                ) from None
            time.sleep(BEAT_S)
    process = subprocess.Popen(
        [sys.executable, "-m", coordinator.__name__, port, str(num), str(JOIN_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # what is sent to a terminal or a job ends the hosts first
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != coordinator.READY:
        raise RuntimeError(f"hosts.coordinator={address}: the coordinator did not start, its last words are above")
    return process


def _connected(address: str, num: int, index: int) -> Any:
    """The client of the coordinator, once all hosts are there. Our words for what jax says in a stack trace."""
    import jax  # which fails here, if it does: once the roll is called, all wait for this host
    from jax._src import distributed

    answer = _answered(address, num, index)
    if answer != coordinator.GO:
        raise RuntimeError(f"hosts.coordinator={address}: {answer}")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM, which is ours
    jax.distributed.initialize(
        f"127.0.0.1:{port_that_leads_to(_socket_address(address))}",
        num,
        index,
        cluster_detection_method="deactivate",
        initialization_timeout=int(JOIN_S),
        heartbeat_timeout_seconds=coordinator.HEARTBEAT_S,
        shutdown_timeout_seconds=coordinator.SHUTDOWN_S,
        coordinator_bind_address="127.0.0.1:0",  # the one that jax starts within host 0, which nobody calls
    )
    return distributed.global_state.client


def _socket_address(address: str) -> tuple[str, int]:
    name, _, port = address.rpartition(":")
    return name.strip("[]"), int(port)


def _answered(address: str, num: int, index: int) -> str:
    """What the coordinator says when all hosts have told it which they are, or when they have not."""
    give_up_s = time.monotonic() + JOIN_S
    while True:
        try:
            with socket.create_connection(_socket_address(address), timeout=coordinator.WORDS_S) as there:
                words = there.makefile(errors="replace")
                if words.readline().strip() != coordinator.HELLO:
                    raise OSError("what answers is no coordinator")
                there.sendall(f"[{index}, {num}]\n".encode())
                there.settimeout(JOIN_S + coordinator.WORDS_S)
                return words.readline().strip() or "the coordinator ended"
        except OSError as problem:
            if time.monotonic() > give_up_s:
                raise RuntimeError(
                    f"host 0 does not answer at hosts.coordinator={address} within {JOIN_S:.0f} s ({problem}): does it "
                    f"run, and is that its address on every host?"
                ) from None
            time.sleep(BEAT_S)


@dataclass
class Heard:
    """What the coordinator last said."""

    answer: int = 0  # how many it gave
    beats: Mapping[str, str] = field(default_factory=dict)
    ended: Sequence[tuple[str, str]] = ()
    stopped_by: int = 0


def _beat(hosts: Hosts, heard: Heard, left: threading.Event) -> None:
    """Says that this host is there, and hears of the others. A coordinator that is cut off never answers."""
    store = hosts.store
    while not left.wait(BEAT_S):
        try:
            store.key_value_set(f"beat/{hosts.index}", str(heard.answer), allow_overwrite=True)
            heard.beats, heard.ended = dict(store.key_value_dir_get("beat")), store.key_value_dir_get("ended")
            heard.stopped_by = max((int(number) for _, number in store.key_value_dir_get("stop")), default=0)
        except RuntimeError as problem:
            if not left.is_set():
                _exit(f"the coordinator beside {hosts.name_of(0)} is gone ({one_line(problem)[:100]})")
        heard.answer += 1


def _watch(hosts: Hosts, heard: Heard, left: threading.Event) -> None:
    """What has ended elsewhere ends here, with its name. Looks are counted: a process that hangs takes none."""
    keys = [f"beat/{host}" for host in range(hosts.num)]
    last: dict[str, object] = {}
    silent = Counter[str]()
    while not left.wait(BEAT_S):
        for key, sentence in heard.ended:
            left.wait(OWN_WORDS_S)
            _exit(f"{hosts.name_of(_host_of(key))} ended: {sentence}")
        # The coordinator is beside host 0, and may outlive it.
        for key, sign in {"answer/0": heard.answer, **{key: heard.beats.get(key) for key in keys}}.items():
            silent[key] = silent[key] + 1 if last.get(key) == sign else 0
            last[key] = sign
            if silent[key] * BEAT_S > LOST_S and not left.is_set():
                _exit(f"{hosts.name_of(_host_of(key))} is lost: nothing was heard of it for {LOST_S:.0f} s")
        if heard.stopped_by:
            hosts.stop(heard.stopped_by)


def _end(hosts: Hosts | None, problem: BaseException) -> NoReturn:
    """Says what went wrong, to the other hosts too, and ends the process: jax would wait for the others first."""
    if DEBUG_FLAG in sys.argv[1:]:
        traceback.print_exception(problem)
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if hosts is not None and type(problem).__name__ == "JaxRuntimeError":
        time.sleep(LOST_S + OWN_WORDS_S)  # a collective fails first where another host is lost: the watch says which
    sentence = one_line(problem)
    if hosts is not None:
        try:
            hosts.store.key_value_set(f"ended/{hosts.index}", sentence, allow_overwrite=True)
            time.sleep(TOLD_S if hosts.leads else 0)
        except RuntimeError:
            sentence += "; the other hosts could not be told"
    _exit(sentence)


def _exit(sentence: str) -> NoReturn:
    say(f"error: {sentence}")
    os._exit(FAILED)


def _leave() -> None:
    import jax

    jax.distributed.shutdown()


def _key(stream: str, turn: int, host: int) -> str:
    return f"said/{stream}/{turn}/{host}"


def _host_of(key: str) -> int:
    return int(key.rpartition("/")[2])
