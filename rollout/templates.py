"""Renders chat templates in a child process, because a template comes with a model and is untrusted code.

Jinja's sandbox denies access to files and attributes, but limits neither time nor memory: nested loops, `"x" * 10**10`
or a text that doubles itself could exhaust the machine, and a timer in the same process cannot interrupt a single long
operation. The kernel therefore limits the child's CPU time and memory, and kills it at the limit; the next request
starts a new child. The child exits when its standard input closes, for example because its parent has died.
"""

import atexit
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2.sandbox
from jinja2.ext import loopcontrols

DEADLINE_S = 10.0  # CPU time per text, independent of other load; the longest rows take a tenth of it
MAX_MEMORY_BYTES = 2**30
MAX_TEMPLATE_CHARS = 2**20
MAX_GROWTH, MIN_CHARS = 16, 2**20  # a rendered text may have MAX_GROWTH times the characters of its input, or MIN_CHARS
MAX_PROBLEM_CHARS = 300


def render(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, **settings: Any) -> str:
    """Renders a dialogue. Raises a ValueError that describes the problem if the template fails."""
    return _renderer.render({"template": template, "values": {"messages": messages, "tools": tools, **settings}})


class _Renderer:
    """This process's child, started on first use and again after its death."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None

    def render(self, request: dict[str, Any]) -> str:
        content = json.dumps(request).encode()
        with self._lock:
            child = self._child = self._child or _start()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(content + b"\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # for example Ctrl-C; the next request must not read this request's answer
                self._end()
                raise
            if not answer.endswith(b"\n"):  # the child has died
                code = self._end()
                raise ValueError(
                    f"it took more than {DEADLINE_S:g} s of CPU"
                    if code == -signal.SIGPROF
                    else f"its process ended with exit code {code}"
                )
        reply = json.loads(answer)
        if "problem" in reply:
            raise ValueError(reply["problem"])
        return reply["text"]

    def _end(self) -> int:
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None and child.stdout is not None
        child.stdout.close()
        with suppress(BrokenPipeError):  # the child died before it read a request
            child.stdin.close()
        try:
            return child.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait()

    def close(self) -> None:
        with self._lock:
            self._end()


def _start() -> subprocess.Popen[bytes]:
    # -P keeps this folder out of sys.path, so that its modules do not shadow others.
    command = [sys.executable, "-P", str(Path(__file__).absolute())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _new_renderer() -> None:
    """Starts a new child after a fork, because processes that share a child would read each other's answers."""
    global _renderer
    _renderer = _Renderer()


_renderer = _Renderer()
os.register_at_fork(after_in_child=_new_renderer)
atexit.register(lambda: _renderer.close())


@cache
def _compiled(chat_template: str) -> jinja2.Template:
    """Compiles a chat template as transformers does (utils/chat_template_utils.py)."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    functions = {
        "raise_exception": raise_exception,
        "strftime_now": lambda pattern: datetime.now().strftime(pattern),
    }
    return environment.from_string(chat_template, functions)


def _answer(request: dict[str, Any], num_chars: int) -> dict[str, str]:
    try:
        if len(request["template"]) > MAX_TEMPLATE_CHARS:
            raise ValueError(f"it has more than {MAX_TEMPLATE_CHARS} characters")
        text = _compiled(request["template"]).render(**request["values"])
    except MemoryError:
        return {"problem": f"it takes more than {MAX_MEMORY_BYTES / 2**30:g} GiB"}
    except Exception as problem:  # a template may raise any error
        kind = "" if isinstance(problem, jinja2.TemplateError | ValueError) else f"{type(problem).__name__}: "
        return {"problem": f"{kind}{problem}"[:MAX_PROBLEM_CHARS]}
    most = max(MIN_CHARS, MAX_GROWTH * num_chars)
    if len(text) > most:
        return {"problem": f"it makes {len(text)} characters of {num_chars}, more than {most}"}
    return {"text": text}


def _main() -> None:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # sent to the whole process group, while the trainer still saves
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process during any operation
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # no stack trace if the parent has died before the answer
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (line := sys.stdin.buffer.readline()).endswith(b"\n"):
        signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
        sys.stdout.buffer.write(json.dumps(_answer(json.loads(line), len(line))).encode() + b"\n")
        sys.stdout.buffer.flush()
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    _main()
