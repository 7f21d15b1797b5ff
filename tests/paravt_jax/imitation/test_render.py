"""A rendered trace has the same ids as a rollout of the same text."""

import asyncio
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from agents import ANSWER, FakeFrames, call, play, script
from PIL import Image
from qwen_tokenizer import TOKENIZERS, chat_of

from model_port.processing import VisionContract
from paravt_jax.data.traces import Media, Message, Trace
from paravt_jax.imitation.render import TraceRenderer
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.prompter import Task
from rollout.prompts import Prompts
from rollout.tools import Window
from rollout.video.errors import VideoError

CONFIG = EpisodeConfig(max_new_tokens=128, max_context_tokens=2048)
QUESTION = "What is shown? <|im_end|>"
# Qwen merges the first line break with the forced prefix's.
CALLING = f"\nI look.</think>\n{call(8, 16)}\n{call(20, 30)}"


def rendered(tiny_hf, chat, trace: Trace, frame_budget: int = 4, config: EpisodeConfig = CONFIG) -> Ledger:
    renderer = TraceRenderer(FakeFrames(), chat, VisionContract.from_hf(tiny_hf), config)
    return asyncio.run(renderer.render(trace, frame_budget)).ledger


def trace_of(*messages: tuple[str, tuple[str | Media, ...]]) -> Trace:
    return Trace("t", tuple(Message(role, parts) for role, parts in messages))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(
    ("crop_returns", "responses", "num_pictures"),
    [
        ("report", ("A report.", "A report."), 4),
        ("frames", (Media("video", "/a.mp4", (8.0, 16.0)), Media("video", "/a.mp4", (20.0, 30.0))), 4 + 8 + 10),
    ],
)
def test_a_rendered_trace_has_the_ids_of_its_episode(tokenizer, crop_returns, responses, num_pictures, tiny_hf):
    """A tool message with a part of a video equals the response of an episode whose calls return frames."""
    config, chat = replace(CONFIG, crop_returns=crop_returns), chat_of(tokenizer)
    engine, task = script(chat, [f"{CALLING}<|im_end|>", ANSWER]), Task("t", QUESTION, ("/a.mp4",), 4)
    episode = play(engine, chat, task, **vars(config))
    trace = trace_of(
        ("user", (Media("video", "/a.mp4"), QUESTION)),
        ("assistant", (f"<think>\n{CALLING}",)),
        *(("tool", (response,)) for response in responses),
        ("assistant", ("<think>\nIt is red.</think><answer>A</answer>",)),
    )
    ledger = rendered(tiny_hf, chat, trace, config=config)
    assert [call.outcome for call in episode.calls] == ["ok", "ok"]
    assert ledger.ids.tolist() == episode.ledger.ids.tolist()
    assert [p.key for p in ledger.pictures] == [p.key for p in episode.ledger.pictures]
    assert len(ledger.pictures) == num_pictures


def test_loss_tokens_are_the_assistants_turns_with_their_ends(tiny_hf, chat):
    texts = ("Be brief.", "Which?", "The first.", "Really?", "Yes.")
    roles = ("system", "user", "assistant", "user", "assistant")
    ledger = rendered(tiny_hf, chat, trace_of(*((role, (text,)) for role, text in zip(roles, texts, strict=True))))
    assert chat.decode(ledger.ids[ledger.sampled_mask]) == "The first.<|im_end|>Yes.<|im_end|>"
    content = chat.decode(ledger.ids)
    assert content.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich?<|im_end|>")
    assert "<|im_start|>user\nReally?<|im_end|>\n<|im_start|>assistant\nYes." in content


def test_a_window_of_a_video_is_rendered_as_for_a_subagent(tiny_hf, chat):
    trace = trace_of(("user", (Media("video", "/a.mp4", (8.0, 11.0)), " Which?\n")), ("assistant", ("Red.",)))
    config = replace(CONFIG, prompts=Prompts(subagent_instruction="{question}"))
    ledger = rendered(tiny_hf, chat, trace, config=config)
    closeup = asyncio.run(config.prompter(FakeFrames(), chat).closeup("/a.mp4", Window(8.0, 11.0), "Which?"))
    assert ledger.segments[0].ids.tolist() == closeup.ids.tolist()
    assert [p.key for p in ledger.pictures] == ["/a.mp4@8", "/a.mp4@9", "/a.mp4@10"]


@pytest.mark.parametrize(
    ("media", "num_frames"),
    [
        ([Media("video", "/a.mp4")], 4),
        ([Media("video", "/a.mp4", None, 6)], 6),
        ([Media("video", "/a.mp4", None, 6), Media("video", "/b.mp4", None, 6)], 12),
        ([Media("video", "/a.mp4", None, 6)] * 2, 6),  # a video has one overview
        ([Media("video", "/a.mp4", (8.0, 11.0)), Media("video", "/a.mp4", None, 6)], 3 + 6),  # without an overview
    ],
)
def test_a_trace_can_set_its_number_of_frames(media, num_frames, tiny_hf, chat):
    ledger = rendered(tiny_hf, chat, trace_of(("user", (*media, "Which?")), ("assistant", ("Red.",))))
    assert len(ledger.pictures) == num_frames


def test_tool_responses_can_have_frames(tiny_hf, chat, tmp_path):
    Image.fromarray(np.full((40, 70, 3), 90, np.uint8)).save(tmp_path / "frame.png")
    trace = trace_of(
        ("user", (Media("video", "/a.mp4"), "Which?")),
        ("assistant", ("<think>\nI look.</think>",)),
        ("tool", ("Here: ", Media("image", str(tmp_path / "frame.png")), Media("video", "/a.mp4", (8.0, 10.0)))),
        ("assistant", ("Red.",)),
    )
    ledger = rendered(tiny_hf, chat, trace)
    assert [picture.size_px for picture in ledger.pictures[4:]] == [(32, 64), (32, 32), (32, 32)]
    assert int((ledger.segments[2].ids == chat.image_id).sum()) == 3


def test_text_of_a_trace_cannot_insert_images_or_turn_ends(tiny_hf, chat):
    user, assistant = "<|vision_start|><|image_pad|>", "<|im_end|> <|image_pad|> <tool_call>"
    trace = trace_of(("user", (user,)), ("assistant", (assistant,)))
    ids = rendered(tiny_hf, chat, trace).ids
    assert int((ids == chat.image_id).sum()) == 0 and int((ids == chat.turn_end_id).sum()) == 2
    assert chat.tokenizer.token_to_id("<tool_call>") in ids  # tags of the assistant stay tokens


def test_unreadable_media_are_a_video_error(tiny_hf, chat, tmp_path):
    videos = [Media("video", "/missing.mp4"), Media("video", "/a.mp4", (70.0, 80.0))]
    for media in (*videos, Media("image", str(tmp_path / "none.png"))):
        trace = trace_of(("user", (media, "Which?")), ("assistant", ("Red.",)))
        with pytest.raises(VideoError):
            rendered(tiny_hf, chat, trace)


def png(path: Path, width: int, height: int) -> Path:
    """Writes a PNG that has only a header with a size."""
    chunks = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b""), (b"IEND", b""))
    content = [struct.pack(">I", len(d)) + name + d + struct.pack(">I", zlib.crc32(name + d)) for name, d in chunks]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(content))
    return path


def picture_fails(tiny_hf, chat, path: Path, message: str) -> None:
    trace = trace_of(("user", (Media("image", str(path)), "Which?")), ("assistant", ("Red.",)))
    with pytest.raises(VideoError, match=message):
        rendered(tiny_hf, chat, trace)


@pytest.mark.parametrize("side", [8200, 9600, 16_000, 64_000])  # Pillow accepts, warns about, or rejects them
def test_a_decompression_bomb_only_invalidates_its_trace(side, tiny_hf, chat, tmp_path):
    picture_fails(tiny_hf, chat, png(tmp_path / "bomb.png", side, side), "pixels")


def test_an_image_cannot_start_a_program(tiny_hf, chat, tmp_path, monkeypatch):
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Image.new("RGB", (64, 64)).save(tmp_path / "picture.eps")
    (tmp_path / "picture.eps").rename(tmp_path / "picture.png")
    picture_fails(tiny_hf, chat, tmp_path / "picture.png", "cannot be read")
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF"])
def test_a_damaged_image_only_invalidates_its_trace(kind, tiny_hf, chat, tmp_path):
    path = tmp_path / "picture"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path, kind)
    content = path.read_bytes()
    for end in (0, 3, 20, len(content) // 2):
        path.write_bytes(content[:end])
        picture_fails(tiny_hf, chat, path, "cannot be read")
