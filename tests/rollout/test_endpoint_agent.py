"""The agent loop over messages has the same turns, calls and sub-agents as over ids, and blocks injection."""

import asyncio
import base64
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import fake_endpoint
import numpy as np
import pytest
from agents import FakeFrames, call
from fake_endpoint import MODEL, FakeEndpoint, asking
from PIL import Image

from rollout.endpoint.agent import CHARS_PER_TOKEN, EndpointAgent, MessageDialogue
from rollout.endpoint.check import check_endpoint
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.words import JPEG_URL, EndpointEncoder, video_part
from rollout.episode import EpisodeCallbacks
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.picture import Picture
from rollout.prompter import Task
from rollout.prompts import Prompts, main_messages
from rollout.records import Episode
from rollout.tools import CROP_VIDEO_SCHEMA

TASK = Task("t1", "What colour is it?\nA. red\nB. blue", ("/data/a.mp4",), frame_budget=4)
LOOK = f"<think>\nWhere?</think>{call(10, 20)}{call(30, 40)}"
ANSWER = "<think>\nIt is red.</think><answer>A</answer>"


def test_responses_may_fill_the_context_exactly():
    client: Any = None
    config = EpisodeConfig(max_context_tokens=1000, max_new_tokens=100)
    dialogue = MessageDialogue(client, config, Ledger(), [], ())
    picture = Picture.of(np.zeros((32, 64, 3), np.uint8))  # 2 tokens
    text = "a" * (CHARS_PER_TOKEN * 499)
    assert not dialogue.respond([(text, picture), (text, "a" * CHARS_PER_TOKEN)]) and dialogue.room == 1000
    assert dialogue.respond([(text, picture), (text,)]) and dialogue.room == 0
    assert not dialogue.respond([("a" * CHARS_PER_TOKEN,)])


def is_subagent(body: dict[str, Any]) -> bool:
    return "looks closely" in body["messages"][0]["content"]


def says(*turns: str, report: str = "A report.") -> Callable[[dict[str, Any]], str]:
    """Returns replies: the main agent's next turn, or a sub-agent's `report`."""

    def say(body: dict[str, Any]) -> str:
        number = sum(message["role"] == "assistant" for message in body["messages"])
        return report if is_subagent(body) else turns[number]

    return say


def play(
    endpoint: FakeEndpoint,
    task: Task = TASK,
    callbacks: EpisodeCallbacks | None = None,
    max_tokens: int | None = None,
    **config: Any,
) -> Episode:
    async def run() -> Episode:
        async with endpoint:
            client = EndpointClient([endpoint.url], MODEL)
            agent = EndpointAgent(client, FakeFrames(), EpisodeConfig(**config))
            try:
                overview = await agent.overview(task)
                return await agent.run(overview, callbacks=callbacks, max_tokens=max_tokens)
            finally:
                await agent.client.close()

    return asyncio.run(run())


def main_bodies(endpoint: FakeEndpoint) -> list[dict[str, Any]]:
    return [body for body in endpoint.bodies if not is_subagent(body)]


def subagent_bodies(endpoint: FakeEndpoint) -> list[dict[str, Any]]:
    return [body for body in endpoint.bodies if is_subagent(body)]


def texts_of(message: dict[str, Any]) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "<picture>") for part in content)


def test_parallel_calls_over_two_turns_form_one_dialogue():
    endpoint = FakeEndpoint(says(LOOK, ANSWER))
    episode = play(endpoint)
    assert [turn.text for turn in episode.turns] == [LOOK, ANSWER] and episode.finish == "done"
    assert episode.outcomes == ["ok", "ok"] and [c.response for c in episode.calls] == ["A report."] * 2
    first, second = main_bodies(endpoint)
    assert second["messages"][:2] == first["messages"]
    assert [message["role"] for message in second["messages"]] == ["system", "user", "assistant", "user"]
    assert texts_of(second["messages"][2]) == LOOK
    response = "<tool_response>\nA report.\n</tool_response>"
    assert texts_of(second["messages"][3]) == f"{response}\n{response}"
    for body, look in zip(subagent_bodies(endpoint), episode.calls, strict=True):
        system, asked = map(texts_of, body["messages"])
        assert "<tools>" not in system and "question" not in asked
        assert asked.count("<picture>") == len(look.frames_s) == 10


def test_frames_are_sent_as_jpegs_after_their_times():
    endpoint = FakeEndpoint(says(ANSWER))
    play(endpoint)
    (body,) = endpoint.bodies
    shown = main_messages(Prompts(), [("video.mp4", 64.0, [0.0, 21.0, 42.0, 63.0])], TASK.question, 5)[1]["content"]
    assert texts_of(body["messages"][1]) == "".join(part.get("text", "<picture>") for part in shown)
    kinds = [part["type"] for part in body["messages"][1]["content"]]
    assert kinds == ["text", "image_url"] * 4 + ["text"]
    url = body["messages"][1]["content"][3]["image_url"]["url"]
    picture = Image.open(io.BytesIO(base64.b64decode(url.removeprefix("data:image/jpeg;base64,"))))
    error = np.abs(np.asarray(picture, int) - FakeFrames().pixels(21)).mean()  # noise is the worst case for JPEG
    assert picture.format == "JPEG" and picture.size == (32, 32) and error < 6


def test_frame_responses_have_pictures_in_order_and_no_sub_agent():
    endpoint = FakeEndpoint(says(f"x</think>{call(5, 7)}{call(90, 99)}{call(60, 63)}", ANSWER))
    episode = play(endpoint, crop_returns="frames")
    assert episode.outcomes == ["ok", "invalid", "ok"] and len(endpoint.bodies) == 2
    content = endpoint.bodies[1]["messages"][3]["content"]
    assert [part["type"] for part in content] == ["text", *["image_url", "text"] * 5]
    shown = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    assert shown == [f"{JPEG_URL}{Picture.of(FakeFrames().pixels(n)).jpeg_base64}" for n in (5, 6, 60, 61, 62)]
    text = texts_of(endpoint.bodies[1]["messages"][3])
    assert text.count("<tool_response>\n") == text.count("\n</tool_response>") == 3
    assert re.search(r"<5\.0 seconds><picture><6\.0 seconds><picture>\n</tool_response>\n<tool_response>\nError", text)
    assert len(episode.ledger.pictures) == 4 + 5 and episode.ledger.sent


def test_pictures_beyond_the_context_of_an_endpoint_fail_their_call():
    """The endpoint reports 77 tokens after the first turn, and a picture has one token."""
    endpoint = FakeEndpoint(says(f"x</think>{call(5, 7)}{call(10, 20)}", ANSWER))
    episode = play(endpoint, crop_returns="frames", max_context_tokens=272, max_new_tokens=90)
    assert episode.outcomes == ["ok", "error"] and episode.finish == "done"
    assert "Error: the pictures of this call need 10 tokens of the context" in episode.calls[1].response


def test_tools_are_described_only_in_the_system_message():
    endpoint = FakeEndpoint(says(ANSWER))
    play(endpoint)
    (body,) = endpoint.bodies
    assert "tools" not in body and "tool_choice" not in body
    system = body["messages"][0]["content"]
    schemas = re.findall(r"<tools>\n(\{.*\})\n</tools>", system)
    assert system.startswith(Prompts().system) and [json.loads(text) for text in schemas] == [CROP_VIDEO_SCHEMA]
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in system


@pytest.mark.parametrize("settings", [{"dispatch": "none"}, {"prompts": Prompts("Use crop_video.", True)}])
def test_tools_are_not_described_twice_or_without_tools(settings):
    endpoint = FakeEndpoint(says(LOOK, ANSWER))
    episode = play(endpoint, **settings)
    assert "<tools>" not in endpoint.bodies[0]["messages"][0]["content"]
    assert len(episode.calls) == (0 if "dispatch" in settings else 2)


def test_sequential_dispatch_makes_one_call_per_turn():
    whole = f"<think>\nWhere?</think>{call(10, 20)}"
    cut = whole.removesuffix("</tool_call>")  # endpoints omit the stop text
    endpoint = FakeEndpoint(says(cut, whole, ANSWER))
    episode = play(endpoint, dispatch="sequential")
    assert [turn.text for turn in episode.turns] == [whole, whole, ANSWER] and episode.outcomes == ["ok", "ok"]
    assert play(FakeEndpoint(says(cut, ANSWER))).outcomes == ["invalid"]  # nothing stops a parallel turn there
    assert all(body["stop"] == ["</tool_call>"] for body in main_bodies(endpoint))
    assert texts_of(main_bodies(endpoint)[1]["messages"][2]).endswith("</tool_call>")
    assert not any("stop" in body for body in subagent_bodies(endpoint))


def test_requests_have_the_sampling_settings_and_distinct_seeds(monkeypatch):
    endpoint, complete, asked = FakeEndpoint(says(LOOK, ANSWER)), EndpointClient.complete, []
    monkeypatch.setattr(EndpointAgent, "top_p", 0.9)
    monkeypatch.setattr(EndpointClient, "complete", lambda *args, **rest: asked.append(rest) or complete(*args, **rest))
    play(endpoint, temperature=0.7, max_new_tokens=100, subagent_new_tokens=50)
    assert len({rest["affinity"] for rest in asked}) == 3  # of the agent and of two windows
    assert {rest["deadline_s"] <= EpisodeConfig().turn_deadline_s for rest in asked} == {True}
    assert [body["max_tokens"] for body in main_bodies(endpoint)] == [100, 100]
    assert [body["max_tokens"] for body in subagent_bodies(endpoint)] == [50, 50]
    assert all((body["temperature"], body["top_p"]) == (0.7, 0.9) for body in endpoint.bodies)
    assert len({body["seed"] for body in endpoint.bodies}) == 4
    greedy = FakeEndpoint(says(ANSWER))
    play(greedy, temperature=0.0)
    assert "seed" not in greedy.bodies[0]


OUTSIDE = [
    *("</tool_response>", "<|im_end|>", "<|im_start|>user", "<|image_pad|>", "<tool_call>", "<think>"),
    *("</s>", "<start_of_turn>", "<eos>", "[INST]", "[/TOOL_RESULTS]", "[THINK]", "<image>", "<｜User｜>"),
]


def test_reports_and_questions_cannot_inject_tags():
    text = " x ".join(OUTSIDE)
    endpoint = FakeEndpoint(says(LOOK, ANSWER, report=f"Seen {text} x"))
    play(endpoint, Task("t", f"Say {text} now", ("/a.mp4",), 2), prompts=Prompts(subagent_instruction="{question}"))
    sent = [texts_of(message) for body in endpoint.bodies for message in body["messages"] if message["role"] == "user"]
    plain = [sent_text.replace("<tool_response>\n", "").replace("\n</tool_response>", "") for sent_text in sent]
    assert any("Seen" in sent_text for sent_text in sent) and any("now" in sent_text for sent_text in sent)
    for text in OUTSIDE:
        assert not any(text in sent_text.partition("Think first")[0] for sent_text in plain), text


def test_the_token_limit_holds_without_token_counts(monkeypatch):
    monkeypatch.setattr(fake_endpoint, "_completion", lambda choices: {"choices": choices})
    endpoint = FakeEndpoint(says(LOOK, ANSWER, report="seen " * 60))
    play(endpoint, max_tokens=400)
    limits = [body["max_tokens"] for body in endpoint.bodies]
    assert limits[1:3] == [(400 - len(LOOK) // CHARS_PER_TOKEN) // 3] * 2  # a third is for later turns
    assert limits[0] == 400 and limits[-1] < 400 - (len(LOOK) + 300) // (2 * CHARS_PER_TOKEN)


def test_a_dialogue_fills_the_context_without_token_counts(monkeypatch):
    monkeypatch.setattr(fake_endpoint, "_completion", lambda choices: {"choices": choices})
    endpoint = FakeEndpoint(says(LOOK, LOOK, ANSWER, report="seen " * 60))  # 200 tokens of responses per turn
    episode = play(endpoint, max_context_tokens=500, max_new_tokens=100)
    assert episode.finish == "context" and len(episode.turns) == 2


def test_a_model_turn_keeps_tags_and_loses_control_tokens():
    turn = f"<think>\n<|im_start|>system</think>{call(1, 2)}"
    endpoint = FakeEndpoint(says(turn, ANSWER))
    play(endpoint)
    sent = texts_of(main_bodies(endpoint)[1]["messages"][2])
    assert sent == turn.replace("<|", "< |") and "<tool_call>" in sent


def test_ordinary_text_is_not_changed():
    text = "Is x < 3 or a <b> c? List<int>, [1, 2], 5 > 4 | y"
    assert EndpointEncoder().escape(text) == text


def test_servers_find_a_video_of_any_name_by_its_url():
    path = Path("/data/50% #1?/ä b.mp4")
    parts = urlsplit(video_part(path)["video_url"]["url"])
    assert (parts.scheme, unquote(parts.path)) == ("file", str(path))  # vLLM and SGLang read the path like this


class Heard(EpisodeCallbacks):
    wants_tokens = True

    def __init__(self) -> None:
        self.texts: list[tuple[int, str]] = []

    def on_text(self, turn_number: int, text: str) -> None:
        self.texts.append((turn_number, text))


def test_callbacks_receive_streamed_text():
    heard = Heard()
    episode = play(FakeEndpoint(says(LOOK, ANSWER)), callbacks=heard)
    assert heard.texts[-1] == (1, episode.turns[1].text)
    assert heard.texts[0] == (0, LOOK.split()[0] + " ") and len(heard.texts) > 5


def test_a_truncated_turn_is_marked_as_truncated():
    episode = play(FakeEndpoint("", "thinking only"))
    assert (episode.finish, episode.turns[0].finish, episode.turns[0].text) == ("length", "length", "")


def test_a_dialogue_that_fills_the_context_ends_before_the_next_turn():
    endpoint = FakeEndpoint(says(LOOK, ANSWER, report="long " * 200))  # 77 tokens after the first turn
    episode = play(endpoint, max_context_tokens=600, max_new_tokens=100)
    assert episode.finish == "context" and len(episode.turns) == 1 and episode.outcomes == ["ok", "ok"]


def test_a_record_has_texts_calls_and_token_counts_without_ids():
    episode = play(FakeEndpoint(says(LOOK, ANSWER)))
    record = json.loads(json.dumps(episode.to_record()))
    assert [turn["num_sampled"] for turn in record["turns"]] == [7, 7]
    assert [each["num_sampled"] for each in record["turns"][0]["calls"]] == [7, 7]
    assert episode.num_sampled == 28 and episode.num_prompt_tokens == 280 and episode.ledger.num_sampled == 14
    assert [segment["ids"] for segment in record["segments"]] == [[]]
    assert len(record["segments"][0]["pictures"]) == 4
    assert len(record["turns"][0]["calls"][0]["segments"][0]["pictures"]) == 10


def test_equal_requests_have_equal_hashes_and_others_do_not():
    sent = [
        play(FakeEndpoint(says(*turns)), **config).to_record()["sent"]
        for turns, config in (
            ((LOOK, ANSWER), {}),
            ((LOOK, ANSWER), {}),
            ((f"x{LOOK}", ANSWER), {}),
            ((LOOK, ANSWER), {"max_new_tokens": 99}),
        )
    ]
    assert sent[0] == sent[1] and len(sent[0]) == 3
    assert len({each[0] for each in sent}) == 3


@asking()
async def test_an_agent_is_as_healthy_as_its_endpoint(client, endpoint):
    agent = EndpointAgent(client, FakeFrames())
    assert (await agent.health()).alive
    await endpoint.die()
    assert not (await agent.health()).alive


@pytest.mark.parametrize("mode", ["empty", "filtered", "thinking only"])
@asking()
async def test_the_picture_check_accepts_any_reply(client, endpoint, mode):
    endpoint.modes = [mode]
    await check_endpoint(client, 0.0)


@pytest.mark.parametrize(
    ("listed", "model"), [(["models/gemini"], "gemini"), (["gemini"], "gemini"), ([], "x"), (None, "x")]
)
@asking()
async def test_a_listed_model_or_an_empty_list_passes_and_gets_one_picture_check(client, endpoint, listed, model):
    endpoint.models, client.model = listed, model
    await check_endpoint(client, 0.0)
    (body,) = endpoint.bodies
    assert [part["type"] for part in body["messages"][0]["content"]] == ["image_url", "text"]
