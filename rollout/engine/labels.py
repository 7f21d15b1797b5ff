"""Weight labels: the run and policy version of a server's weights.

SGLang keeps one string with its weights, `weight_version`, and returns it with every span of sampled tokens. A run
writes its id and the policy version as the label `RUN/12`. The label `RUN/` means that a run has claimed the server but
not yet loaded weights. The label `RUN/?OTHER` is a question: the run OTHER wants this server and asks if RUN is alive.
If RUN is alive, it sees the question at its next probe and writes its own label back. This protocol compares no clocks,
and sends nothing unless a run asks.

`rollout.serve` starts SGLang with the label `default;weights_port=24000`, which is treated like `default`. SGLang's
/server_info keeps this initial label when the label changes, so a run can find the port that receives weights
(`rollout.receiver`) there.
"""

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout.engine.http import HttpClient, ServerUnavailable
from rollout.engine.protocol import EngineError
from rollout.engine.settings import SGLangSettings
from rollout.server import INITIAL_LABEL

MAX_CHARS = 200
WITH_WEIGHTS_PORT = re.compile(rf"{INITIAL_LABEL};weights_port=(\d{{1,5}})", re.ASCII)  # as `initial_label` writes it
RUN_LABEL = re.compile(r"(.+/)(?:(\d{1,9})|\?([\w.-]+))?", re.ASCII)


class WrongLabel(ServerUnavailable):
    """A server's weights are not the ones this engine gave it."""


class ServerOwned(EngineError):
    """Another live run publishes to this server."""


@dataclass(frozen=True)
class Label:
    owner: str  # `RUN/`, or the whole label if no run wrote it, such as SGLang's "default"
    version: int | None = None  # None if the label is a claim or a question
    asker: str = ""  # the id of the run that asks for the server

    @classmethod
    def of(cls, text: Any) -> "Label":
        if not isinstance(text, str) or len(text) > MAX_CHARS or not text.isprintable():
            raise ValueError(f"{text!r:.60} is not a label of weights")
        match = RUN_LABEL.fullmatch(text)
        if match is None:
            return cls(INITIAL_LABEL if WITH_WEIGHTS_PORT.fullmatch(text) else text, 0)
        owner, version, asker = match.groups()
        return cls(owner, int(version) if version else None, asker or "")

    def __str__(self) -> str:
        if not self.run:
            return self.owner
        return self.owner + (f"?{self.asker}" if self.asker else "" if self.version is None else str(self.version))

    @property
    def run(self) -> str:
        """The id of the run that wrote the label, or ""."""
        return self.owner[:-1] if self.owner.endswith("/") else ""

    def is_foreign(self, owner: str) -> bool:
        """Returns whether another run than `owner` wrote the label."""
        return bool(self.run) and self.owner != owner


def taken_over(label: Label) -> str:
    return f"it was taken over by another run, {label.run}, and no longer gets weights of this one"


class Labels:
    """Reads and writes labels, and claims servers for a run."""

    def __init__(self, client: HttpClient, settings: SGLangSettings):
        self._client, self._settings = client, settings
        self._owner = f"{settings.run}/"

    async def fetch(self, url: str) -> Label:
        info = await self._client.get(f"{url}/model_info", self._settings.control_deadline_s)
        try:
            return Label.of(info["weight_version"])
        except (KeyError, TypeError, ValueError) as problem:
            raise ServerUnavailable(f"{url} reports no valid weight label: {problem!r}") from None

    async def publish(self, url: str, label: Label) -> None:
        """Writes a server's label. Running requests continue, and their next tokens get the new label."""
        body = {"new_version": str(label), "abort_all_requests": False}
        await self._client.post(f"{url}/update_weight_version", body, self._settings.control_deadline_s)

    async def claim(
        self, url: str, on_progress: Callable[[str], None], *, was_claimed: bool, first: bool, take_over: bool
    ) -> None:
        """Claims a server for this run. Raises ServerOwned if another live run owns it.

        `was_claimed` means that this run has claimed the server before. `first` means that this run has published
        nothing yet, so the server's initial weights are version 0. `take_over` skips asking the owner.
        """
        label = await self.fetch(url)
        while label.is_foreign(self._owner) and not take_over:
            if was_claimed:
                raise ServerOwned(taken_over(label))
            question = Label(label.owner, asker=self._settings.run)
            if (answer := await self._ask(url, question, on_progress)) == question:
                break
            if answer.owner == label.owner:
                other = f"{answer.asker}, asks for it too" if answer.asker else f"{label.run}, publishes to it"
                raise ServerOwned(
                    f"{url} cannot have weights of two runs: another live run, {other}. Use other servers "
                    f"in engine.urls, stop that run, or take its servers with --take-over"
                )
            label = answer
        if not label.run and first:
            await self.publish(url, Label(self._owner, 0))
        elif label.asker or label.is_foreign(self._owner):
            await self.publish(url, Label(self._owner))

    async def _ask(self, url: str, question: Label, on_progress: Callable[[str], None]) -> Label:
        """Writes the question and waits for an answer. Returns the new label, or the question if nobody answers."""
        wait_s = self._settings.owner_answers_s
        await self.publish(url, question)
        on_progress(
            f"{url} has weights of another run, {question.run}: waiting up to {wait_s:.0f} s for a sign that this run "
            f"is alive (--take-over skips the wait)"
        )
        give_up_s = time.monotonic() + wait_s
        while (label := await self.fetch(url)) == question and time.monotonic() < give_up_s:
            await asyncio.sleep(min(1.0, self._settings.probe_every_s))
        return label
