"""Headless Chromium, controlled through a pipe: a page's content, console output and screenshot.

`python browser.py PAGE OUT.png [--dark] [--phone] [--full]` takes a screenshot, and prints the times to draw and to
filter the page.
"""

import argparse
import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--remote-debugging-pipe")
DESKTOP, PHONE = (1280, 1100), (390, 844)
TIMES = """(() => {
  const filter = [...document.querySelectorAll(".filters select")].find(one => one.querySelector("[value=wrong]"));
  const took = (filter ? ['right', 'wrong', 'missing', ''] : []).map(value => {
    const began = performance.now();
    filter.value = value;
    filter.dispatchEvent(new Event('change'));
    document.body.getBoundingClientRect();
    return Math.round(performance.now() - began);
  });
  const paint = performance.getEntriesByName('first-contentful-paint')[0];
  return `drawn after ${Math.round(paint.startTime)} ms, filtered in ${took.join(', ')} ms`;
})()"""
MESSAGES = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")  # errors that pages must not cause


class Tab:
    """A browser tab, which shows one page at a time."""

    def __init__(self, to_browser: int, from_browser: int):
        self._to, self._from, self._buffer = to_browser, from_browser, b""
        self._number, self._session = 0, None
        self.messages: list[Any] = []  # errors and console output
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path, fragment: str = "") -> None:
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=page.absolute().as_uri() + fragment)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def run(self, script: str) -> Any:
        """Returns a script's value after the page has settled."""
        settled = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({script}), 60)))"
        answer = self("Runtime.evaluate", expression=settled, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def show_as(self, size_px: tuple[int, int] = DESKTOP, *, dark: bool = False) -> None:
        width, height = size_px
        self("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        media.append({"name": "prefers-reduced-motion", "value": "reduce"})
        self("Emulation.setEmulatedMedia", media="", features=media)

    def picture(self, out: Path, *, full: bool = False) -> None:
        self.run("0")
        shot = self("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        out.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            self._buffer += os.read(self._from, 2**20)
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if message.get("method") in MESSAGES:
            self.messages.append(message["params"])
        return message


@contextmanager
def browser() -> Iterator[Tab]:
    assert CHROMIUM is not None
    browser_input, to_browser = os.pipe()
    from_browser, browser_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [CHROMIUM, *OPTIONS, f"--user-data-dir={profile}"]
        script = f'exec "$@" 3<&{browser_input} 4>&{browser_output}'
        command = ["bash", "-c", script, "bash", *command]
        pipes = (browser_input, browser_output)
        process = subprocess.Popen(command, pass_fds=pipes, stderr=subprocess.DEVNULL)
        os.close(browser_input)
        os.close(browser_output)
        try:
            yield Tab(to_browser, from_browser)
        finally:
            process.kill()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("--full", action="store_true")
    args = parser.parse_args()
    with browser() as tab:
        tab.show_as(PHONE if args.phone else DESKTOP, dark=args.dark)
        tab.open(args.page)
        print(tab.run(TIMES))
        tab.picture(args.out, full=args.full)
        for message in tab.messages:
            print(json.dumps(message)[:600])


if __name__ == "__main__":
    main()
