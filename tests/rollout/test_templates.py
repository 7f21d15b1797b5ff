"""A chat template is untrusted code: it can harm neither the machine nor the run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from model_port.qwen3_vl.chat_template import CHAT_TEMPLATE
from rollout import templates
from rollout.templates import render

MESSAGES = [{"role": "user", "content": "x"}]
DOUBLED = "{% set ns = namespace(x='x' * 1000) %}" + "{% set ns.x = ns.x ~ ns.x %}" * 40


def test_an_endless_template_is_stopped_and_the_next_one_renders(monkeypatch):
    code = "from rollout import templates\ntemplates.DEADLINE_S = 0.3\ntemplates._main()"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    monkeypatch.setattr(templates, "_renderer", templates._Renderer())
    monkeypatch.setattr(templates, "_start", lambda: subprocess.Popen([sys.executable, "-c", code], **pipes))
    template = "{{ 9 ** (9 ** 9) }}"  # a single interpreter operation that threads and signal handlers cannot interrupt
    with pytest.raises(ValueError, match="it took more than"):
        render(template, MESSAGES, None)
    assert render("{{ messages[0].content }}", MESSAGES, None) == "x"
    templates._renderer.close()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ 'x' * 10**10 }}", "it takes more than 1 GiB"),
        pytest.param(DOUBLED, "it takes more than 1 GiB", id="doubled"),
        ("{{ 'x' * 2**21 }}", r"it makes 2097152 characters of \d+, more than 1048576"),
        ("x" * 2**21, "it has more than 1048576 characters"),
        ("{% for", "unexpected 'end of template'"),
        ("{{ messages.nothing.deep }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum recursion depth"),
        ("{{ raise_exception('y' * 1000) }}", "^y{300}$"),
    ],
)
def test_template_errors_are_reported(template, problem):
    with pytest.raises(ValueError, match=problem):
        render(template, MESSAGES, None)


def test_a_long_text_has_no_size_limit():
    text = "y" * 3_000_000
    assert text in render(CHAT_TEMPLATE, [{"role": "user", "content": text}], None)


def test_threads_and_forks_get_their_own_results():
    found = {}

    def ask(name: str) -> None:
        messages = [{"role": "user", "content": name}]
        found[name] = [render("{{ messages[0].content }}", messages, None) for _ in range(50)]

    threads = [threading.Thread(target=ask, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [name] * 50 for name in map(str, range(4))}
    code = (
        "import os\nfrom rollout.templates import render, _renderer\n"
        "ask = lambda x: render('{{ messages[0] }}', [x], None)\n"
        "assert ask('a') == 'a'\npid = os.fork()\nassert [ask(str(pid > 0) + str(n)) for n in range(99)] == "
        "[str(pid > 0) + str(n) for n in range(99)]\n"
        "if pid: assert os.waitpid(pid, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_the_child_ends_with_its_parent(how):
    code = (
        "import os, time\nfrom rollout import templates\n"
        "templates.render('x', [], None)\nprint(templates._renderer._child.pid, flush=True)\n"
        f"{'os.kill(os.getpid(), 9)' if how == 'kill' else ''}"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "" and done.returncode == (-9 if how == "kill" else 0)
    end_s = time.monotonic() + 10
    while psutil.pid_exists(int(done.stdout)) and time.monotonic() < end_s:
        time.sleep(0.02)
    assert not psutil.pid_exists(int(done.stdout)) or psutil.Process(int(done.stdout)).status() == psutil.STATUS_ZOMBIE


def test_signals_to_the_process_group_do_not_kill_the_child():
    render("x", [], None)
    child = templates._renderer._child
    for number in (2, 15):
        os.kill(child.pid, number)
    assert render("x", [], None) == "x" and templates._renderer._child is child


def test_a_child_whose_parent_has_died_says_nothing():
    command = [sys.executable, "-P", templates.__file__]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.close()
    request = {"template": "x", "values": {}}
    _, errors = child.communicate(json.dumps(request).encode() + b"\n", timeout=60)
    assert child.returncode == -signal.SIGPIPE and errors == b""
