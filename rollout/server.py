"""Runs an SGLang or vLLM server as a managed process.

The server has its own environment (SGLang's: scripts/setup_sglang.sh) and runs under `rollout.supervisor`, which kills
all of its processes when this process ends, even by SIGKILL. The server's latest output is kept, so that an error can
show its last lines. An SGLang server never resizes images; see `NO_RESIZE`.
"""

import asyncio
import concurrent.futures
import contextlib
import errno
import importlib.util
import json
import os
import random
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

import aiohttp

from rollout import supervisor

ROOT = Path(__file__).parents[1]
SIDECAR = ROOT / ".venv-sglang"
SHIM = Path(__file__).parent / "sglang_cpu" / "shim"
PLUGIN = Path(__file__).parent / "sglang_plugin"
PYTHON_VARIABLE = "PARAVT_SGLANG_PYTHON"

Device = Literal["cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: dict[Device, Dtype] = {"cpu": "float32", "cuda": "bfloat16"}  # "auto" would turn float32 files into float16

# Frames arrive at their final size. The published processor files set a minimum of 65536 pixels, which would enlarge
# every frame below 256 x 256. With this setting, a size that is not a multiple of the patch size is an error instead.
NO_RESIZE = {"image": {"do_resize": False}}

VISION_CACHE_MIB = 1024  # about 600 frames of 49 tokens for the 8B model with its DeepStack maps in bfloat16

# Below the kernel's range for outgoing connections, because such a connection could take the port during loading.
FREE_PORTS = range(20_000, 30_000)

# With this cache, SGLang keeps the ids of every request with pictures. Without it, SGLang computes the tokens of a
# Qwen2.5-VL picture from the size limits in the processor files. If these limits would have resized a picture, SGLang
# decodes the ids and re-encodes the text, which changes ids that a policy has sampled.
PICTURE_CACHE_MIB = 256

# Without GPU kernels the vision tower computes masked attention over all pictures of a prefill at once, which took
# minutes for eight crops of sixteen frames. Smaller prefill chunks have fewer pictures.
CPU_PREFILL_TOKENS = 128

INITIAL_LABEL = "default"  # SGLang's label for the weights that a server starts with

MARK_VARIABLE = "PARAVT_SERVER"
POLL_S = 0.25
HEALTH_TIMEOUT_S = 30  # the server generates a token for /health, and compiles kernels for the first token
ERROR_LINES = 30  # lines of output in an error, enough for a Python traceback and its context
ERROR_LINE_CHARS = 300
KEPT_LINES = 2_000
MAX_LINE_BYTES = 4_096
MAX_PORT = 65_535
LISTENING = "0A"  # TCP_LISTEN in /proc/net/tcp
KILL_TIMEOUT_S = 30  # the kernel takes time to free a killed process's memory


class ServerFailed(RuntimeError):
    """The server did not start, or crashed. The message is one sentence, followed by the server's last lines."""

    def __init__(self, sentence: str, last_lines: list[str]) -> None:
        lines = "".join(f"\n  | {line[:ERROR_LINE_CHARS]}" for line in last_lines)
        super().__init__(f"{sentence}; its last lines:{lines}" if lines else f"{sentence}; it wrote nothing")


@dataclass(frozen=True)
class ServerSettings:
    """An SGLang server's settings."""

    model: Path  # a Hugging Face directory
    device: Device = "cpu"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    dtype: Dtype | None = None  # None: float32 on cpu, bfloat16 on cuda
    context_length: int = 32_768
    max_total_tokens: int | None = None  # size of the KV pool; None: two contexts on cpu, by memory_frac on cuda
    memory_frac: float = 0.8  # cuda: fraction of the device memory for weights and KV pool
    max_running_requests: int | None = None  # None: 16 on cpu, SGLang's default on cuda
    trainable_vision: bool = False  # True: no cache of image embeddings, which would survive a weight update
    tensor_parallel: int = 1
    gpus: tuple[str, ...] = ()  # cuda: its GPUs, as in CUDA_VISIBLE_DEVICES; (): the first visible GPUs
    weights_port: int | None = None  # port where `rollout.receiver` receives weights for this server
    python: Path | None = None  # interpreter of SGLang's environment; None: see `sidecar_python`
    extra_args: tuple[str, ...] = ()  # for sglang.launch_server; they come last and therefore take precedence

    def __post_init__(self) -> None:
        check_port(f"port={self.port}", self.port)
        for name in ("context_length", "max_total_tokens", "max_running_requests", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        if self.max_total_tokens is not None and self.max_total_tokens < self.context_length:
            raise ValueError(
                f"max_total_tokens={self.max_total_tokens} must hold one context, context_length={self.context_length}"
            )
        if not 0 < self.memory_frac < 1:
            raise ValueError(f"memory_frac={self.memory_frac} must be between 0 and 1")
        if self.device == "cpu" and self.tensor_parallel > 1:
            raise ValueError(f"tensor_parallel={self.tensor_parallel} needs device=cuda")
        if self.gpus and (self.device == "cpu" or len(self.gpus) != self.tensor_parallel):
            raise ValueError(
                f"gpus={self.gpus} needs device=cuda and tensor_parallel={len(self.gpus)}, got device={self.device} "
                f"and tensor_parallel={self.tensor_parallel}"
            )

    def settled(self) -> Self:
        """Returns the settings with their interpreter and port filled in. Raises if the server cannot be started."""
        if not (self.model / "config.json").is_file():
            raise ValueError(f"model={self.model} is not a Hugging Face model directory: it has no config.json")
        python = self.python or sidecar_python()
        if not os.access(python, os.X_OK):
            raise ValueError(f"python={python} is not an executable")
        return replace(self, python=python, port=settled_port(self.host, self.port))

    async def is_ready(self, http: aiohttp.ClientSession) -> bool:
        """Returns whether the server is healthy. Raises if its model does not accept images."""
        try:
            async with http.get("/health", raise_for_status=True):
                pass
            async with http.get("/model_info", raise_for_status=True) as reply:
                info = await reply.json()
        except (aiohttp.ClientError, TimeoutError):
            return False
        if not info.get("has_image_understanding"):
            raise ValueError(f"model={self.model} does not accept images: its type is {info.get('model_type')!r}")
        return True

    def command(self) -> list[str]:
        options: dict[str, Any] = {
            "--model-path": self.model,
            "--host": self.host,
            "--port": self.port,
            "--device": self.device,
            "--dtype": self.dtype or DTYPES[self.device],
            "--context-length": self.context_length,
            "--mm-process-config": json.dumps(NO_RESIZE),
            "--mm-preprocess-cache-size-mb": PICTURE_CACHE_MIB,
            "--max-total-tokens": self.max_total_tokens,
            "--max-running-requests": self.max_running_requests,
            "--weight-version": initial_label(self.weights_port) if self.weights_port else None,
        }
        flags = [
            "--skip-server-warmup",  # the warmup image would have to be resized
            "--sleep-on-idle",  # otherwise an idle server keeps a core busy that the learner needs
        ]
        if is_mixture(self.model):
            flags.append("--enable-return-routed-experts")  # the learner replays the routing
        if self.device == "cpu":
            options["--max-total-tokens"] = self.max_total_tokens or 2 * self.context_length  # SGLang's: all memory
            options["--max-running-requests"] = self.max_running_requests or 16
            options["--attention-backend"] = "torch_native"
            options["--chunked-prefill-size"] = CPU_PREFILL_TOKENS
            options["--sampling-backend"] = "pytorch"
            options["--cuda-graph-backend-decode"] = "disabled"
            options["--cuda-graph-backend-prefill"] = "disabled"
            flags.append("--disable-overlap-schedule")
        else:
            options["--mem-fraction-static"] = self.memory_frac
            options["--tensor-parallel-size"] = self.tensor_parallel
        pairs = [str(part) for name, value in options.items() if value is not None for part in (name, value)]
        return [str(self.python or sidecar_python()), "-m", "sglang.launch_server", *pairs, *flags, *self.extra_args]

    def environment(self) -> dict[str, str]:
        """Returns the server's environment variables. PATH has ninja, with which SGLang builds kernels."""
        environment = environment_of(self.python or sidecar_python(), self.gpus) | {
            "PYTHONPATH": str(PLUGIN),
            "SGLANG_VLM_CACHE_SIZE_MB": "0" if self.trainable_vision else str(VISION_CACHE_MIB),
        }
        if self.device == "cpu":
            environment |= {
                "PYTHONPATH": f"{SHIM}:{PLUGIN}",
                "SGLANG_USE_CPU_ENGINE": "1",
                "TORCHDYNAMO_DISABLE": "1",  # compiling for the first image takes longer than all tests
                "OMP_NUM_THREADS": "1",
            }
        return environment


@dataclass(frozen=True)
class VllmSettings:
    """A vLLM server's settings."""

    model: Path
    name: str  # the model's name in requests
    dtype: Dtype
    context_length: int
    gpus: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    program: Path | None = None
    options: Mapping[str, str | int] = field(default_factory=dict)  # override or extend the defaults

    def settled(self) -> Self:
        settings = replace(self, port=settled_port(self.host, self.port))
        program = shutil.which("vllm")
        if program is None:
            raise RuntimeError(
                f"engine.serve_with=vllm: vllm is not on the PATH; install vLLM in a separate environment "
                f"and put its bin directory on the PATH, or start it elsewhere and set engine.urls=[URL/v1] and "
                f"engine.model={self.name}: {shlex.join(settings.command())}"
            )
        return replace(settings, program=Path(program).absolute())

    def command(self) -> list[str]:
        options = {
            "--served-model-name": self.name,
            "--host": self.host,
            "--port": self.port,
            "--dtype": self.dtype,
            "--max-model-len": self.context_length,
            "--tensor-parallel-size": max(1, len(self.gpus)),
            "--generation-config": "vllm",  # otherwise the model's own penalties would change the sampling
            **self.options,
        }
        pairs = [str(part) for option in options.items() for part in option]
        return [str(self.program or "vllm"), "serve", str(self.model), *pairs]

    def environment(self) -> dict[str, str]:
        assert self.program is not None
        return environment_of(self.program, self.gpus)

    async def is_ready(self, http: aiohttp.ClientSession) -> bool:
        try:
            async with http.get("/health") as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


Startable = ServerSettings | VllmSettings


def is_mixture(model: Path) -> bool:
    config = model / "config.json"
    text = json.loads(config.read_bytes()).get("text_config", {}) if config.is_file() else {}
    return bool(text.get("num_experts") or text.get("num_local_experts"))


def environment_of(program: Path, gpus: Sequence[str]) -> dict[str, str]:
    """Returns this process's environment variables without the learner's libraries, which a server must not load."""
    environment = dict(os.environ)
    for name in ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "SGLANG_USE_CPU_ENGINE"):
        environment.pop(name, None)
    libraries = environment.pop("LD_LIBRARY_PATH", "").split(":")  # other entries may be needed to find the GPU driver
    if libraries := [path for path in libraries if path and not Path(path).is_relative_to(sys.prefix)]:
        environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    environment |= {
        "PATH": f"{program.parent}:{environment.get('PATH', os.defpath)}",
        "PYTHONSAFEPATH": "1",  # the working directory contains modules of this project
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return environment | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})


def sidecar_python() -> Path:
    """Returns a Python that has SGLang: PYTHON_VARIABLE's, that of .venv-sglang beside the package, or this one."""
    if named := os.environ.get(PYTHON_VARIABLE):
        return Path(named)
    python = SIDECAR / "bin" / "python"
    if (SIDECAR / ".setup-stamp").exists():  # written last, so an incomplete environment has no stamp
        return python
    if importlib.util.find_spec("sglang"):
        return Path(sys.executable)
    state = "is only half installed" if SIDECAR.exists() else "does not exist"
    raise RuntimeError(
        f"{SIDECAR} {state}: run `bash scripts/setup_sglang.sh cpu` (or cuda) in a clone, or set {PYTHON_VARIABLE} to "
        f"a Python that has SGLang"
    )


class Server:
    """A running server. It is not tied to an event loop: different loops may start and stop it."""

    def __init__(self, settings: Startable, log_file: Path | None = None) -> None:
        self.settings = settings  # including the chosen port
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._log = log_file.open("ab", buffering=0) if log_file else None
        self._ended: concurrent.futures.Future[int] = concurrent.futures.Future()
        self._ended.set_running_or_notify_cancel()  # a cancelled waiter must not cancel the future for others
        self._mark = uuid.uuid4().hex  # an environment variable that identifies all processes of the server
        self._process = subprocess.Popen(
            supervisor.supervised(settings.command()),
            env=settings.environment() | {MARK_VARIABLE: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        # Threads read the output, because a server blocks on a full pipe, and event loops may be busy.
        reader = threading.Thread(target=self._read_output, name="sglang-output", daemon=True)
        reader.start()
        threading.Thread(target=self._watch, args=(reader,), name="sglang-watch", daemon=True).start()

    @classmethod
    async def start(
        cls,
        settings: Startable,
        *,
        deadline_s: float,
        on_progress: Callable[[str], None] | None = None,
        log_file: Path | None = None,
    ) -> "Server":
        """Starts a server and waits until it is ready; `on_progress` gets its latest line meanwhile."""
        server = cls(settings.settled(), log_file)
        try:
            async with asyncio.timeout(deadline_s):
                await server._ready(on_progress or (lambda line: None))
        except TimeoutError:
            await server.stop(grace_s=0)
            raise server._failure(f"the server was not ready within the deadline of {deadline_s:g} s") from None
        except BaseException:  # also on cancellation, because nothing else would stop this server
            await asyncio.shield(server.stop(grace_s=0))
            raise
        return server

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.settings.host, self.settings.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.settings.port}"

    @property
    def pid(self) -> int:
        """The supervisor's process id, which is also the id of its session and process group."""
        return self._process.pid

    @property
    def running(self) -> bool:
        return not self._ended.done()

    def last_lines(self, n: int) -> list[str]:
        """Returns the server's latest n lines of output, oldest first."""
        return list(self._lines)[-n:]

    async def wait(self) -> int:
        """Waits until every process of the server has ended. Returns the exit code; 128 + n for signal n."""
        return await asyncio.wrap_future(self._ended)

    async def stop(self, grace_s: float) -> None:
        """Stops the server and waits for its processes. Requests get `grace_s` to finish before it is killed."""
        for request, patience_s in (
            (signal.SIGTERM, grace_s),
            (supervisor.KILL_NOW, KILL_TIMEOUT_S),
            (signal.SIGKILL, KILL_TIMEOUT_S),  # to the supervisor, whose children die with it
        ):
            if patience_s <= 0 or not self.running:
                continue
            with contextlib.suppress(ProcessLookupError, TimeoutError):  # it has just ended; on a timeout, escalate
                os.kill(self.pid, request)
                async with asyncio.timeout(patience_s):
                    await self.wait()
        if self.running:
            raise RuntimeError(f"process {self.pid} of the server survives SIGKILL; it may still occupy its GPU")

    async def _ready(self, on_progress: Callable[[str], None]) -> None:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT_S)
        async with aiohttp.ClientSession(self.url, timeout=timeout) as http:
            while not (self._listens() and await self.settings.is_ready(http)):
                if not self.running:
                    raise self._failure(f"the server ended with {self._exit_reason()} before it was ready")
                on_progress(next(iter(self.last_lines(1)), ""))
                await asyncio.sleep(POLL_S)

    def _listens(self) -> bool:
        """Returns whether this server has opened the port. Raises if another program has taken it."""
        sockets = _listening_sockets(self.settings.host, self.settings.port)
        if not sockets:
            return False
        for process in supervisor.processes():
            if process.group == self.pid and sockets & _open_files(process.pid):
                return True
        if not sockets & _listening_sockets(self.settings.host, self.settings.port):
            return False  # the socket belonged to this server, which has just ended
        raise self._failure(f"another process took port {self.settings.port} while the server was starting")

    def _failure(self, sentence: str) -> ServerFailed:
        return ServerFailed(sentence, self.last_lines(ERROR_LINES))

    def _exit_reason(self) -> str:
        code = self._ended.result(timeout=0)
        number = code - 128 if code >= 0 else -code  # negative if the supervisor itself was killed
        return signal.Signals(number).name if number in signal.valid_signals() else f"exit code {code}"

    def exit_error(self) -> ServerFailed:
        """Returns the error for a server that ended without a call of `stop`."""
        return self._failure(f"the server at {self.url} ended with {self._exit_reason()}")

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            while raw := output.readline(MAX_LINE_BYTES):
                if self._log:
                    with contextlib.suppress(OSError):  # on a full disk, keep reading, or the server would block
                        self._log.write(raw)
                line = raw.rstrip().rpartition(b"\r")[2]  # the last state of a progress bar
                if line:
                    self._lines.append(line.decode(errors="replace"))
        if self._log:
            self._log.close()

    def _watch(self, reader: threading.Thread) -> None:
        shared = supervisor.SharedFiles(self.pid)
        # WNOWAIT does not reap the process, so its group id stays valid.
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            shared.scan_if_due()
            time.sleep(POLL_S)
        # Processes only survive if the supervisor itself was killed.
        os.killpg(self.pid, signal.SIGKILL)
        give_up_s = time.monotonic() + KILL_TIMEOUT_S
        while (survivors := _marked(self._mark)) and time.monotonic() < give_up_s:
            for pid in survivors:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        shared.remove()
        reader.join(KILL_TIMEOUT_S)
        self._ended.set_result(self._process.wait())


def _marked(mark: str) -> list[int]:
    """Returns the ids of processes that have the mark in their environment, in any session or group."""
    marked, variable = [], f"{MARK_VARIABLE}={mark}".encode()
    for process in supervisor.processes():
        with contextlib.suppress(OSError):  # the process has ended, or is another user's
            if variable in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                marked.append(process.pid)
    return marked


def initial_label(weights_port: int) -> str:
    """Returns the initial label with the port that receives weights; see `rollout.engine.labels`."""
    return f"{INITIAL_LABEL};weights_port={weights_port}"


def check_port(setting: str, port: int) -> None:
    """Raises if a port is invalid, because getaddrinfo would take it modulo 65536. `setting` names it in errors."""
    if not 0 <= port <= MAX_PORT:
        raise ValueError(f"{setting} must be from 0 (any free port) to {MAX_PORT}")


def settled_port(host: str, port: int) -> int:
    """Returns the port, or a free port for 0. Raises if it is not possible to listen there."""
    candidates = [port] if port else random.sample(FREE_PORTS, 100)
    for candidate in candidates:
        try:
            with socket.socket(_family(host)) as probe:
                # Ignores closed connections, as the server does.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, candidate))
                return candidate
        except OSError as problem:
            if port or problem.errno != errno.EADDRINUSE:
                sentence = f"cannot listen on {host}:{candidate} ({problem.strerror})"
                raise ValueError(f"{sentence}; use another host or port, or port 0 for any free port") from None
    raise RuntimeError(f"tried {len(candidates)} ports on {host}, and none is free; set a port")


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _hex_address(host: str) -> str:
    """Returns a host's address as in /proc/net/tcp and tcp6: words of four bytes, in the byte order of the machine."""
    *_, (address, *_) = socket.getaddrinfo(host, 0, _family(host), socket.SOCK_STREAM)[0]
    packed = socket.inet_pton(_family(host), str(address).partition("%")[0])
    words = (packed[start : start + 4] for start in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _listening_sockets(host: str, port: int) -> set[str]:
    """Returns the listening sockets that a connection to host and port can reach, as named in /proc/PID/fd."""
    address = _hex_address(host)
    sockets = set()
    only_ipv6 = ":" in host and int(address, 16) != 0
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))[only_ipv6:]:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            _, local, _, state, _, _, _, _, _, inode = line.split()[:10]
            local_address, _, local_port = local.partition(":")
            reachable = local_address == address or not int(local_address, 16) or not int(address, 16)
            if state == LISTENING and int(local_port, 16) == port and reachable:
                sockets.add(f"socket:[{inode}]")
    return sockets


def _open_files(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has ended or closed a file
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                inodes.add(str(entry.readlink()))
    return inodes
