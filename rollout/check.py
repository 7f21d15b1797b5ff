"""The parity gate: compares the log-probs of servers with the learner's.

    python -m rollout.check --model CKPT --url URL [--url URL …]   # the same as paravt gate

Each server runs episodes on test pictures of several sizes. It also scores fixed dialogues that have every structural
token and a picture in a tool's response. The learner scores the same ids and pictures. The gate compares

- the log-probs that the server returned for tokens while it sampled them,
- the log-probs that the server computes for all tokens of the fixed dialogues,
- the expanded ids, which differ if a server resizes a picture or re-encodes the text.

Training runs the gate before its first step. The bounds are in `rollout.parity`.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollout.chat import Chat
from rollout.dialogue import num_expanded
from rollout.engine.http import HttpClient
from rollout.engine.protocol import EngineError, Sampling
from rollout.engine.sglang import SGLangEngine, generate_body
from rollout.episode import Agent
from rollout.episode_config import EpisodeConfig
from rollout.ledger import Ledger
from rollout.parity import SHOWN, Parity, Scored, Scorer, ScoreRequest
from rollout.parts import pictures_of, with_times
from rollout.picture import Picture
from rollout.prompter import Overview, Task
from rollout.video.box import Box
from rollout.video.info import TimedPicture, VideoInfo

# Height and width of common videos: 16:9, 4:3, 1:1, portrait, cinema, and a very small video.
VIDEO_SIZES_PX = ((1080, 1920), (480, 640), (512, 512), (1280, 720), (800, 1920), (64, 96))
STRUCTURAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|im_end|>")
# Encoded letter by letter, as a policy may sample it, so that a server that re-encodes the text gets other ids.
FIRST_TURN = (
    "<think>\n",
    *"I look closer.",
    "</think>\n\n<tool_call>\n"
    '{"name": "crop_video", "arguments": {"video_path": "video.mp4", "start_time": 20, "end_time": 30}}\n'
    "</tool_call><|im_end|>",
)
LAST_TURN = "<think>\nThe frames show it.</think><answer>A</answer><|im_end|>"
SHOWN_S = 25.0  # time of the frame in the response to the call; no prompt shows this frame
DURATION_S = 60.0
FRAME_BUDGET = 4
NEW_TOKENS = 64
TEMPERATURE = 0.7
DEADLINE_S = 300.0  # for each answer of a server


async def check(
    urls: Sequence[str],
    scorer: Scorer,
    chat: Chat,
    *,
    num_episodes: int = 12,
    on_progress: Callable[[str], None] = lambda message: None,
) -> list[Parity]:
    """Compares every server with the learner, on at least `num_episodes` episodes, as many for each picture size."""
    sizes_px = list(dict.fromkeys(await asyncio.to_thread(scorer.settled, VIDEO_SIZES_PX)))
    parities = []
    async with HttpClient() as client:
        for url in urls:
            info = await client.get(f"{url}/server_info", DEADLINE_S)
            parity = Parity(url, str(info.get("dtype")))
            for number, size_px in enumerate(sizes_px):
                on_progress(f"{url}: pictures of {size_px[0]} x {size_px[1]} px ({number + 1} of {len(sizes_px)})")
                num_each = -(-num_episodes // len(sizes_px))
                ledgers, dialogue = await _run_episodes(url, size_px, chat, num_each, info)
                for ledger in ledgers:
                    await _compare_sampled(parity, ledger, scorer, chat)
                ids, logp = await _server_scores(client, url, dialogue)
                ours, wrong = await asyncio.to_thread(scorer.score, [dialogue, with_wrong_last(dialogue)])
                _compare_dialogue(parity, ids, logp, ours, chat, size_px)
                _compare_shown(parity, logp, ours, wrong, chat)
            parities.append(parity)
    return parities


async def _run_episodes(
    url: str, size_px: tuple[int, int], chat: Chat, num_episodes: int, info: dict[str, Any]
) -> tuple[list[Ledger], ScoreRequest]:
    """Runs episodes on a server. Returns their ledgers, and the fixed dialogue with pictures of this size."""
    config = EpisodeConfig(
        max_turns=1,
        max_new_tokens=NEW_TOKENS,
        subagent_new_tokens=NEW_TOKENS,
        max_context_tokens=int(info["context_length"]),
        temperature=TEMPERATURE,
        turn_deadline_s=DEADLINE_S,
    )
    engine = await SGLangEngine.connect([url])
    try:
        agent = Agent(engine, TestCard(size_px), chat, config)
        overview = await agent.overview(Task(f"card-{size_px}", "What is shown?", ("card.mp4",), FRAME_BUDGET))
        shown = await agent.frames.frames("card.mp4", [SHOWN_S], DEADLINE_S)
        dialogue = _dialogue(overview, shown, chat, config)
        num_tokens = num_expanded(dialogue.ids, dialogue.pictures, chat.token_px)
        if num_tokens >= config.max_context_tokens:
            raise ValueError(
                f"{url} has a context of {config.max_context_tokens} tokens, and the parity gate needs "
                f"{num_tokens + 1}; raise rollout.max_context_tokens, or --context-length of rollout.serve"
            )
        episodes = await asyncio.gather(*(agent.run(overview, number) for number in range(num_episodes)))
    finally:
        await engine.close()
    return [ledger for episode in episodes for ledger in episode.ledgers], dialogue


def _dialogue(overview: Overview, frames: Sequence[TimedPicture], chat: Chat, config: EpisodeConfig) -> ScoreRequest:
    ids = np.concatenate([overview.ids, *map(chat.encode, FIRST_TURN)])
    response = with_times(["A report, and a frame:", *frames], config.prompts)
    ids = np.concatenate([ids, chat.after_turn(ids, [response]), chat.encode(LAST_TURN)])
    return ScoreRequest(ids, (*overview.pictures, *pictures_of(response)))


async def _compare_sampled(parity: Parity, ledger: Ledger, scorer: Scorer, chat: Chat) -> None:
    """Compares the log-probs that the server returned while sampling."""
    if any(not chat.visual_ids.isdisjoint(segment.ids.tolist()) for segment in ledger.sampled):
        return  # a sampled picture placeholder has no picture, so the dialogue cannot be scored
    (ours,) = await asyncio.to_thread(scorer.score, [ScoreRequest(ledger.ids, ledger.pictures, TEMPERATURE)])
    sampled = ledger.sampled_mask
    offsets = ours.offsets(ledger.behavior_logp[sampled], sampled_positions(ledger, chat))
    parity.add("sampled", offsets)
    parity.add("structural", offsets[:, _structural(ledger.ids[sampled], chat)])


def _compare_dialogue(
    parity: Parity, ids: np.ndarray, logp: np.ndarray, ours: Scored, chat: Chat, size_px: tuple[int, int]
) -> None:
    if not np.array_equal(ids, ours.ids):
        resizes = np.count_nonzero(ids == chat.image_id) != np.count_nonzero(ours.ids == chat.image_id)
        parity.wrong_ids.append(
            f"a dialogue with pictures of {size_px[0]} x {size_px[1]} px has {len(ids)} ids on {parity.url}, but "
            f"{len(ours.ids)} different ids in the learner, so the server "
            f"{'resizes pictures' if resizes else 're-encodes the text'}; start it with python -m rollout.serve"
        )
        return
    offsets = ours.offsets(logp)[:, 1:]
    is_image = ours.ids == chat.image_id
    parity.add("dialogue", offsets[:, ~is_image[1:]])
    parity.add("after_image", offsets[:, is_image[:-1] & ~is_image[1:]])
    parity.add("structural", offsets[:, _structural(ours.ids[1:], chat)])


def with_wrong_last(dialogue: ScoreRequest) -> ScoreRequest:
    """Replaces the last picture, in the tool's response, by the previous one, as if a server had ignored it."""
    *earlier, previous, _ = dialogue.pictures
    return replace(dialogue, pictures=(*earlier, previous, previous))


def _compare_shown(parity: Parity, logp: np.ndarray, ours: Scored, wrong: Scored, chat: Chat) -> None:
    """Compares the log-probs after the picture in the tool's response, if the server's ids match the learner's."""
    if len(logp) == len(ours.ids):
        after = slice(int(np.flatnonzero(ours.ids == chat.image_id)[-1]) + 1, None)
        parity.add(SHOWN, np.stack([*ours.offsets(logp)[:, after], (ours.logp - wrong.logp)[after]]))


async def _server_scores(client: HttpClient, url: str, request: ScoreRequest) -> tuple[np.ndarray, np.ndarray]:
    """Returns a dialogue's expanded ids and their log-probs on a server."""
    body = generate_body(request.ids, request.pictures, Sampling(1, request.temperature))
    body |= {"logprob_start_len": 0, "return_prompt_token_ids": True}
    answer = await client.post(f"{url}/generate", body, DEADLINE_S)
    logp = [0.0 if logp is None else logp for logp, *_ in answer["meta_info"]["input_token_logprobs"]]
    ids = np.array(answer["prompt_token_ids"], np.int32)
    if len(ids) != len(logp):
        raise EngineError(f"{url} gave {len(logp)} log-probs for {len(ids)} ids")
    return ids, np.array(logp, np.float32)


def sampled_positions(ledger: Ledger, chat: Chat) -> np.ndarray:
    """Returns the positions of the sampled ids after the picture placeholders are expanded."""
    counts = ledger.num_tokens_each(chat.image_id, chat.token_px)
    return (np.cumsum(counts) - 1)[ledger.sampled_mask]


def _structural(ids: np.ndarray, chat: Chat) -> np.ndarray:
    tokens = [token for token in map(chat.tokenizer.token_to_id, STRUCTURAL) if token is not None]
    return np.isin(ids, tokens)


@dataclass(frozen=True)
class TestCard:
    """A source of test frames: noise over a gradient, which any resize or lossy encoding changes.

    Each frame has different colors, so that the order of frames matters.
    """

    size_px: tuple[int, int]

    async def info(self, path: str, deadline_s: float | int) -> VideoInfo:
        return VideoInfo("test card", DURATION_S, int(DURATION_S), *self.size_px)

    async def frames(
        self, path: str, times_s: Sequence[float | int], deadline_s: float | int, box: Box | None = None
    ) -> list[TimedPicture]:
        return [TimedPicture(time_s, Picture.of(self._pixels(int(time_s * 10)))) for time_s in times_s]

    def fitted(self, picture: Picture) -> Picture:
        return picture.resized(*self.size_px)

    def _pixels(self, seed: int) -> np.ndarray:
        height, width = self.size_px
        random = np.random.default_rng(seed)
        down, across = random.uniform(0, 112, (2, 3))
        gradient = np.linspace(0, down, height)[:, None] + np.linspace(0, across, width)[None]
        noise = random.integers(0, 32, (height, width, 3))
        return (gradient + noise).astype(np.uint8)


if __name__ == "__main__":
    # Runs another program, because the scorer needs jax, which this package never imports.
    os.execv(sys.executable, [sys.executable, "-m", "paravt_jax.sampling.score", *sys.argv[1:]])
