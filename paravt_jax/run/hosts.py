"""Connects the hosts of a run with `jax.distributed`, and exchanges small values between them as JSON.

Every host runs the same program on its part of the mesh. Values are sent as bytes through the devices
(`multihost_utils.process_allgather`), like gradients. So all hosts must exchange values and start programs on the
shared mesh in the same order: on the program's main path, never in a background thread. A single host gets its own
value back without jax.

`jax.distributed` also detects failures: when a host ends, jax ends the others within HEARTBEAT_S, with a message and a
nonzero exit code. The launcher then restarts all hosts.
"""

import asyncio
import errno
import hashlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from model_port.bucket import in_background
from model_port.cli import DEBUG_FLAG, FAILED, INTERRUPTED, one_line
from model_port.terminal import say
from paravt_jax.config import AUTO, HostsConfig
from paravt_jax.run.gpu_assignment import num_visible_gpus

Value = TypeVar("Value")
JOIN_S = 300  # timeout for all hosts to connect
ABORT_S = 60  # jax gets this much more, because its timeout aborts the process with a C++ stack trace
REPORT_S = 10  # a host that waits for longer reports it
REACH_S = 5  # timeout for reaching the coordinator's port, to explain a failure
HEARTBEAT_S = 60  # a host without a heartbeat for this long is considered dead
SHUTDOWN_S = 60  # timeout for all hosts to disconnect at the end
LAST_WORDS_S = 3.0  # host 0 exits this much later, because jax ends the other hosts when the coordinator is gone
MIN_BYTES = 256  # minimum message size; longer messages are padded to powers of 2, so that few programs are compiled
GIVE_ADDRESS = "give hosts.coordinator=ADDRESS:PORT, hosts.num and hosts.index"  # advice in errors
MAX_DIFFERENCES = 3  # differences to list in an error
JAX_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|CANCELLED): ")  # ValueErrors with gloo
# Environment variables that distinguish the processes of a machine, by the kind of its launcher: job and rank.
RANKS = ("SLURM_JOB_ID", "SLURM_PROCID", "OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_RANK")


class Hosts:
    """All hosts of a run, as seen by one of them."""

    def __init__(self, index: int = 0, num: int = 1):
        self.index, self.num = index, num
        self.all_failed = False  # set before an error that every host raises

    @property
    def leads(self) -> bool:
        """Whether this is host 0, which writes the run's files."""
        return self.index == 0

    def gather(self, name: str, value: Value) -> list[Value]:
        """Gathers every host's value, in host order. Values must be JSON; tuples and arrays arrive as lists.

        All hosts must call this at the same point of the program; `name` identifies that point.
        """
        if self.num == 1:
            return [value]
        messages = _allgather_bytes(json.dumps([name, value], default=as_json).encode())
        names, values = zip(*map(json.loads, messages), strict=True)
        if len(set(names)) > 1:
            self.all_failed = True
            points = ", ".join(f"host {host} at {other!r}" for host, other in enumerate(names))
            raise RuntimeError(f"the hosts are at different points of the program: {points}")
        return list(values)

    async def gather_async(self, name: str, value: Value) -> list[Value]:
        """Gathers values like `gather`, without blocking the event loop."""
        return [value] if self.num == 1 else await asyncio.to_thread(self.gather, name, value)

    def host_0_first(self, work: Callable[[], Value]) -> Value:
        """Runs `work` on host 0 first, then on the others, which find the files that it made."""
        results = [work()] if self.leads else []
        self.gather("host 0 first", None)
        return results[0] if results else work()

    def check_same(self, values: Callable[[], Mapping[str, Any]], fix: str) -> None:
        """Raises on every host if hosts have different values under a name; `fix` is the error's advice."""
        if self.num == 1:
            return
        mine = json.loads(json.dumps(dict(values()), default=as_json))
        (first_name, first), *other_hosts = self.gather("check_same", (socket.gethostname(), mine))
        for host, (hostname, other) in enumerate(other_hosts, 1):
            differ = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            if differ:
                self.all_failed = True
                lines = [f"{name} is {other.get(name)}, not {first.get(name)}" for name in differ]
                more = f", and {len(differ) - MAX_DIFFERENCES} more" if len(differ) > MAX_DIFFERENCES else ""
                raise ValueError(
                    f"host {host} ({hostname}) differs from host 0 ({first_name}): "
                    f"{'; '.join(lines[:MAX_DIFFERENCES])}{more}; {fix}"
                )


ALONE = Hosts()


@contextmanager
def joined(config: HostsConfig) -> Iterator[Hosts]:
    """Connects the hosts of a run until the body ends. Call it before any code asks jax for a device.

    After an error the process exits here, because jax would first wait for the other hosts.
    """
    if not config.coordinator:
        yield ALONE
        return
    hosts = Hosts(config.index, config.num)
    try:
        lock = _lock(config)
        hosts = _connect(config)
        yield hosts
        hosts.gather("end", None)
    except BaseException as problem:
        _exit(problem, hosts)
    import jax

    jax.distributed.shutdown()
    lock.close()


def _lock(config: HostsConfig) -> socket.socket:
    """Locks this host's place in the run until this process ends. Raises if another process here has it.

    A second process with the same index that connects to a live coordinator would end the first one's run. Pods are not
    locked, because several on a machine may have its network, and nothing in their environment identifies their job.
    """
    is_auto = config.coordinator == AUTO
    place = [AUTO, *map(os.environ.get, RANKS)] if is_auto else [config.coordinator, config.index]
    lock = socket.socket(socket.AF_UNIX)
    if is_auto and "KUBERNETES_SERVICE_HOST" in os.environ:
        return lock
    try:
        # An abstract name, which the kernel frees when the process ends. Like ports, it belongs to a network namespace.
        lock.bind(f"\0paravt_jax.{hashlib.blake2s(json.dumps(place).encode()).hexdigest()}")
    except OSError as problem:
        if problem.errno != errno.EADDRINUSE:  # a sandbox without abstract names
            return lock
        lock.close()
        index = "" if is_auto else f" with hosts.index={config.index}"
        raise RuntimeError(
            f"another process on this machine already runs with hosts.coordinator={config.coordinator}{index}: wait "
            f"for it, or end it"
        ) from None
    return lock


def _check_port(config: HostsConfig) -> None:
    """Raises if another program uses host 0's port. gRPC would share it (SO_REUSEPORT) and get the other's hosts."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    port = int(config.coordinator.rpartition(":")[2])
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignores closed connections, as gRPC does
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind(("", port))
        except OSError as problem:
            if problem.errno not in (errno.EADDRINUSE, errno.EACCES):
                return
            raise RuntimeError(
                f"hosts.coordinator={config.coordinator}: host 0 cannot listen on port {port} ({problem.strerror}): "
                f"end the program that uses it, or choose another port"
            ) from None


def _is_local(coordinator: str) -> bool:
    """Returns whether this machine has the address; also if its name cannot be resolved."""
    with suppress(OSError, UnicodeError):  # a label of the name may be empty or too long
        for family, _, _, _, address in socket.getaddrinfo(coordinator.rpartition(":")[0].strip("[]"), 0):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(address)
                return True
        return False
    return True


@contextmanager
def _without_proxies() -> Iterator[None]:
    """Hides proxies: gRPC would use http_proxy even for the coordinator, and hosts connect directly."""
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if name.lower().endswith("_proxy")}
    try:
        yield
    finally:
        os.environ.update(proxies)


def _connect(config: HostsConfig) -> Hosts:
    import jax  # imported late, so that --help and invalid settings do not load jax

    if config.index == 0 and config.coordinator != AUTO:
        _check_port(config)
        if not _is_local(config.coordinator):
            say(
                f"hosts.coordinator={config.coordinator} is not an address of this machine, but hosts.index=0: on the "
                f"other machines, set hosts.index=1, 2, …"
            )
    jax.config.update("jax_enable_preemption_service", False)  # this service would replace our SIGTERM handler
    options: dict[str, Any] = {}
    if config.coordinator != AUTO:
        options = dict(coordinator_address=config.coordinator, num_processes=config.num, process_id=config.index)
        options["cluster_detection_method"] = "deactivate"
    elif gpus := num_visible_gpus():
        options["local_device_ids"] = range(gpus)  # under Slurm jax would take one GPU per process
    initialize = partial(
        jax.distributed.initialize,
        **options,
        initialization_timeout=JOIN_S + ABORT_S,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_S,
    )
    try:
        with _without_proxies():
            _wait_for_hosts(initialize, config)
    except ValueError as problem:
        raise ValueError(
            f"hosts.coordinator={config.coordinator}: neither Slurm nor a TPU pod nor Kubernetes describes the hosts "
            f"({one_line(problem)}); {GIVE_ADDRESS}"
        ) from None
    except RuntimeError as problem:
        start = (
            f"start all hosts within {JOIN_S} s, each with the same hosts.num (here {config.num}) and its own "
            f"hosts.index, and choose"
        )
        if config.coordinator == AUTO:
            start = f"let the launcher start all hosts within {JOIN_S} s, or {GIVE_ADDRESS}, with"
        raise RuntimeError(
            f"the hosts did not connect at hosts.coordinator={config.coordinator} ({one_line(problem)}): {start} a "
            f"free port that all of them can reach"
        ) from None
    if jax.default_backend() == "cpu":
        # jax caches only host 0's programs. A cached program may run its collectives in another order than a compiled
        # one; then the hosts wait for each other forever.
        jax.config.update("jax_enable_compilation_cache", False)
    if config.coordinator == AUTO:
        return Hosts(jax.process_index(), jax.process_count())
    return Hosts(config.index, config.num)


def _wait_for_hosts(initialize: Callable[[], object], config: HostsConfig) -> None:
    """Connects in a thread, because jax's own wait ignores Ctrl-C and ends in an abort."""
    connected = in_background(initialize)
    if wait([connected], min(REPORT_S, JOIN_S)).not_done:
        where = "" if config.coordinator == AUTO else f": this is host {config.index} of hosts.num={config.num}"
        say(f"waiting up to {JOIN_S} s for all hosts to connect at hosts.coordinator={config.coordinator}{where}")
        if wait([connected], JOIN_S - REPORT_S).not_done:
            raise RuntimeError(_missing(config))
    connected.result()


def _missing(config: HostsConfig) -> str:
    """Returns the reason why the hosts did not connect."""
    if config.index and config.coordinator != AUTO:
        host, _, port = config.coordinator.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), REACH_S).close()
        except (OSError, UnicodeError) as problem:
            return f"this host cannot reach host 0 there: {one_line(problem)}"
    return "another host is missing"


def _allgather_bytes(message: bytes) -> list[bytes]:
    import jax
    from jax.experimental.multihost_utils import process_allgather

    num_devices = Counter(device.process_index for device in jax.devices())
    if len(set(num_devices.values())) > 1:
        counts = ", ".join(f"host {host} {number}" for host, number in sorted(num_devices.items()))
        raise ValueError(f"all hosts must have the same number of devices, but they have: {counts}")
    lengths = process_allgather(np.int32(len(message)))
    padded = np.zeros(max(MIN_BYTES, 1 << (int(lengths.max()) - 1).bit_length()), np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    return [row[:length].tobytes() for row, length in zip(process_allgather(padded), lengths, strict=True)]


def as_json(value: Any) -> Any:
    """Converts a numpy array or scalar to JSON types."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be sent to other hosts")


def _exit(problem: BaseException, hosts: Hosts) -> NoReturn:
    if DEBUG_FLAG in sys.argv[1:]:
        traceback.print_exception(problem)
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    if isinstance(problem, KeyboardInterrupt):
        say("interrupted")
        os._exit(INTERRUPTED)
    of_jax = type(problem).__name__ == "JaxRuntimeError" or JAX_STATUS.match(str(problem))
    own = str(problem).startswith("RESOURCE_EXHAUSTED")  # this host's memory
    lost = "; another host may have failed, see its log" if of_jax and not own else ""
    say(f"error: {one_line(problem)}{lost}")
    try:
        if hosts.all_failed:  # waits for hosts that report the error later, because they still compile a program
            import jax

            wait([in_background(jax.distributed.shutdown)], SHUTDOWN_S)
        elif hosts.leads:
            time.sleep(LAST_WORDS_S)
    finally:  # also after Ctrl-C, when Python's own exit would disconnect again, which aborts the process
        os._exit(FAILED)
