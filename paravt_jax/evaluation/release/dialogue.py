"""Runs a dialogue of the released evaluation: messages to an endpoint, crops as pictures, and a final request.

There are no sub-agents. Every call of a turn gets its own user message. After the last turn with calls, a last user
message demands the answer.
"""

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from paravt_jax.config import SINGLE_TURN_MODES
from paravt_jax.evaluation.release.calls import CALLS_IN, MalformedCall, sage_answer, window_of
from paravt_jax.evaluation.release.pictures import ReleasePictures
from paravt_jax.evaluation.release.questions import ReleaseQuestion
from paravt_jax.evaluation.release.texts import ReleaseTexts
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.words import video_part

Channel = Literal["image_url", "video_url"]
Message = dict[str, Any]
MAX_TOKENS = 2048
LAST_CHOICE_TOKENS, LAST_WINDOW_TOKENS = 64, 128  # token limits of the demanded answer
MAX_TURNS, MAX_CALLS = 3, 5  # turns with calls, calls per turn
TEMPERATURE = 0.0
DEADLINE_S = 1800.0  # per request


@dataclass
class ReleaseTurn:
    text: str
    finish: str
    latency_s: float
    crops: list[dict[str, Any]] = field(default_factory=list)  # window and number of frames of each call


@dataclass
class ReleaseDialogue:
    """One sample's dialogue, filled while it runs."""

    num_frames: int = 0  # frames of the overview
    turns: list[ReleaseTurn] = field(default_factory=list)
    malformed: str = ""  # the call for which the released driver drops the sample
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0
    seconds: float = 0.0
    num_messages: int = 0  # messages of the last request
    sent: str = ""  # hash of all requests
    final: str = ""  # the reply that is scored

    @property
    def crops(self) -> list[dict[str, Any]]:
        return [crop for turn in self.turns for crop in turn.crops]


@dataclass(frozen=True)
class ReleaseAgent:
    """Runs dialogues in one mode and channel."""

    client: EndpointClient
    pictures: ReleasePictures
    texts: ReleaseTexts
    mode: str
    channel: Channel

    async def run(self, question: ReleaseQuestion, dialogue: ReleaseDialogue) -> None:
        """Runs the dialogue of a question and fills `dialogue`. Raises EndpointError."""
        started_s = time.monotonic()
        if self.channel == "video_url":
            parts = [video_part(Path(question.video))]
        else:
            parts = await self.pictures.overview(question.video)
            dialogue.num_frames = len(parts)
        asked = user_message([*parts, {"type": "text", "text": question.text}])
        messages = [{"role": "system", "content": self.texts.system(self.mode)}, asked]
        try:
            await self._turns(question, messages, dialogue)
        except MalformedCall as problem:
            dialogue.malformed, dialogue.final = str(problem), ""
        finally:
            dialogue.seconds = time.monotonic() - started_s

    async def _turns(self, question: ReleaseQuestion, messages: list[Message], dialogue: ReleaseDialogue) -> None:
        for number in range(MAX_TURNS):
            reply = await self._complete(question, messages, MAX_TOKENS, dialogue)
            calls = [] if self.mode in SINGLE_TURN_MODES else CALLS_IN[self.mode](reply)[:MAX_CALLS]
            if not calls:
                dialogue.final = sage_answer(reply) if self.mode == "agentic_sage" else reply
                return
            messages.append({"role": "assistant", "content": reply})
            for call in calls:
                messages.append(await self._response(question, call, dialogue))
            if number == MAX_TURNS - 1:
                name, num_tokens = (
                    ("last.choice", LAST_CHOICE_TOKENS) if question.is_choice else ("last.window", LAST_WINDOW_TOKENS)
                )
                messages.append(user_message(self.texts.fill(name)))
                dialogue.final = await self._complete(question, messages, num_tokens, dialogue)

    async def _response(self, question: ReleaseQuestion, call: Any, dialogue: ReleaseDialogue) -> Message:
        """The response to a call as a user message: pictures and text, or only text."""
        start_s, end_s = window_of(call)
        shown = await self.pictures.crop(question.video, start_s, end_s)
        window_s = [time_s if math.isfinite(time_s) else None for time_s in (start_s, end_s)]  # JSON has no others
        dialogue.turns[-1].crops.append({"window_s": window_s, "num_frames": len(shown)})
        if not shown:
            return user_message(self.texts.fill("response_error", start_s=start_s, end_s=end_s))
        text = self.texts.fill("response", num_frames=len(shown), start_s=start_s, end_s=end_s)
        return user_message([*shown, {"type": "text", "text": text}])

    async def _complete(
        self, question: ReleaseQuestion, messages: Sequence[Message], num_tokens: int, dialogue: ReleaseDialogue
    ) -> str:
        new = list(map(_without_directories, messages[dialogue.num_messages :]))
        content = json.dumps([dialogue.sent, new, num_tokens])
        dialogue.sent = hashlib.blake2b(content.encode(), digest_size=12).hexdigest()
        dialogue.num_messages = len(messages)
        reply = await self.client.complete(
            list(messages),
            max_tokens=num_tokens,
            temperature=TEMPERATURE,
            deadline_s=DEADLINE_S,
            affinity=question.video,
        )
        dialogue.turns.append(ReleaseTurn(reply.text, reply.finish, reply.latency_s))
        dialogue.num_prompt_tokens += reply.num_prompt_tokens
        dialogue.num_sampled_tokens += reply.num_sampled_tokens
        return reply.text


def user_message(content: str | list[dict[str, Any]]) -> Message:
    return {"role": "user", "content": content}


def _without_directories(message: Message) -> Message:
    """Removes the directories of videos from a message, because they differ between machines."""
    if isinstance(message["content"], str):
        return message
    parts = [
        {"video": Path(part["video_url"]["url"]).name} if part["type"] == "video_url" else part
        for part in message["content"]
    ]
    return message | {"content": parts}
