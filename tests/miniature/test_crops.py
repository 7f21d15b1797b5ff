"""The comparison of parallel and sequential calls: prompts, counts and the page."""

import asyncio
import re
from dataclasses import replace

import pytest
from agents import FakeFrames

from model_port.processing import VisionContract
from paravt_jax.config import EvalConfig, SftConfig, load_config
from paravt_jax.data.traces import read_trace
from paravt_jax.imitation.render import TraceRenderer
from paravt_jax.rl.episodes import RolloutWorker
from rollout.chat import Chat
from rollout.engine.scripted import ScriptedEngine
from rollout.episode import Agent
from rollout.ledger import Ledger
from scripts.miniature import crops_page
from scripts.miniature.cells import read_rows
from scripts.miniature.crops import CELLS, MAX_IN_FLIGHT, NUM_TIMED, Crops, EpisodeRunner, summary
from scripts.miniature.dials import load_world
from scripts.miniature.model import make_model
from scripts.miniature.traces import PLAYS, rows_of
from scripts.miniature.world import WINDOW_S, questions

WORLD = load_world("crops")
BUDGET = 8


@pytest.fixture(scope="module")
def crops(tmp_path_factory):
    made = Crops(tmp_path_factory.mktemp("crops"), WORLD)
    make_model(made.model)
    return made


def renderer_of(crops: Crops, config) -> TraceRenderer:
    return TraceRenderer(FakeFrames(), Chat.from_hf(crops.model), VisionContract.from_hf(crops.model), config)


def open_runner(crops: Crops) -> tuple[EpisodeRunner, ScriptedEngine]:
    """Opens a runner whose engine calls for each window in the prompt within the limit, and answers red."""
    *_, job = crops.experiment.jobs()
    config, chat = load_config(job.config, *job.settings, schema=EvalConfig), Chat.from_hf(crops.model)

    async def reply(request) -> list[int]:
        text = chat.decode(request.ids)
        start_s, end_s = map(int, re.findall(r"from (\d+) to (\d+) seconds", f"{text} from 0 to 8 seconds")[0])
        windows = [(second, second + WINDOW_S) for second in range(start_s, end_s, WINDOW_S)]
        made = text.count("<tool_response>")
        if "Summarize." in text:
            turn = "No color is shown."
        elif "calls a turn" not in text or made == len(windows):
            turn = "</think>\n<answer>red</answer>"
        else:
            chosen = windows if "Up to 5" in text else windows[made : made + 1]
            arguments = '{{"video_path": "video.mp4", "start_time": {}, "end_time": {}}}'
            calls = (f'{{"name": "crop_video", "arguments": {arguments.format(*window)}}}' for window in chosen)
            turn = "</think>\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return chat.encode(f"{turn}<|im_end|>").tolist()

    engine = ScriptedEngine(reply)
    worker = RolloutWorker(Agent(engine, FakeFrames(), chat, config.rollout), config.reward, None, 0)
    return EpisodeRunner(worker, renderer_of(crops, config.rollout), crops.directory, BUDGET), engine


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_count_turns_calls_and_the_visual_tokens_of_the_contexts(crops, n):
    runner, _ = open_runner(crops)
    (question,) = crops.questions([3], n)
    expected = {
        "parallel": (2, n, 8, 8 + 8 * n),
        "sequential": (n + 1, n, 8, 8 + 8 * n),
        "one context": (1, 0, 8 + 8 * n, 8 + 8 * n),
        "frames": (2, n, 8 + 8 * n, 8 + 8 * n),
    }
    main_tokens = {}
    for play in PLAYS:
        (row,) = asyncio.run(runner.episodes(play, [replace(question, answer="red")]))
        assert (row["turns"], row["calls"], row["context_tokens"], row["visual_tokens"]) == expected[play]
        assert row["accuracy"] == 1 and row["seconds"] > 0
        main_tokens[play] = row["main_tokens"]
    assert main_tokens["frames"] >= main_tokens["parallel"] + 3 * 8 * n  # a frame has its time, start and end


def asked_and_rendered(crops, play, number) -> tuple[ScriptedEngine, Ledger, SftConfig]:
    """Plays an episode about a question of a scene, and renders the cold start's trace of the same question."""
    fracs = {f"{kind.replace(' ', '_')}_frac": float(play == kind) for kind in PLAYS[1:]}
    scene, sft = WORLD.scene(0, 0), crops.experiment.cold_start("sft")
    row = rows_of([scene], [BUDGET], replace(WORLD.traces, **fracs), 0, WORLD.questions)[number]
    runner, engine = open_runner(crops)
    asyncio.run(runner.episode(play, questions(scene, WORLD.questions)[number]))
    trace = read_trace(row, lambda _: str(runner.videos / scene.video))
    config = load_config(sft.config, *sft.settings, schema=SftConfig)
    return engine, asyncio.run(renderer_of(crops, config.rollout).render(trace, BUDGET)).ledger, config


@pytest.mark.parametrize("play", PLAYS)
def test_an_episode_starts_with_the_prompt_of_the_cold_starts_traces(crops, play):
    engine, ledger, _ = asked_and_rendered(crops, play, 2)
    prompt = ledger.segments[0]
    assert engine.requests[0].ids[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    assert [p.key for p in engine.requests[0].pictures] == [p.key for p in prompt.pictures]


def test_calls_that_return_frames_have_the_dialogue_of_their_traces(crops):
    engine, ledger, config = asked_and_rendered(crops, "frames", 4)
    assert len(engine.requests) == 2 and len(engine.requests[1].pictures) == 6 * BUDGET
    chat, response = Chat.from_hf(crops.model), ledger.segments[2].ids.tolist()
    forced = chat.encode(config.rollout.forced_prefix)
    assert engine.requests[1].ids[: -len(forced)].tolist()[-len(response) :] == response
    assert ledger.num_tokens_each(chat.image_id, 32).sum() <= config.pack.row_tokens


def test_a_summary_has_means_and_an_interval_over_videos():
    own = summary([{"turns": 2, "accuracy": float(number % 4 > 0), "seconds": 1.0} for number in range(100)])
    low, high = own.pop("interval_95")
    assert own == {"turns": 2, "accuracy": 0.75, "episodes": 100} and 0.6 < low < 0.75 < high < 0.9


def test_timed_cells_share_no_video_with_each_other_or_the_warm_up(crops):
    seen = []

    class Watched:
        async def episode(self, play, question):
            seen.append(question.scene.number)
            return {"seconds": 1.0}

        async def episodes(self, play, chosen):
            return [await self.episode(play, question) for question in chosen]

    rows = asyncio.run(crops.times(Watched(), "jax"))
    num_timed = len(CELLS) * NUM_TIMED
    warm, timed = {*seen[:-num_timed]}, {*seen[-num_timed:]}
    assert len(rows) == len(CELLS) and len(timed) == num_timed and len(warm) == MAX_IN_FLIGHT and not timed & warm


@pytest.mark.slow
def test_the_page_has_the_numbers_and_the_figure_of_its_data(tmp_path):
    rows, page = read_rows(crops_page.MEASURED), crops_page.PAGE.read_text()
    measured = [(row["windows"], row["play"]) for row in rows]
    assert measured == [cell for cell in CELLS if cell in measured] and all(row["episodes"] >= 128 for row in rows)
    changed = crops_page.with_table(page, "windows", crops_page.table(rows))
    assert changed == page, "run python -m scripts.miniature.crops_page"
    assert "](crops.png)" in page
    crops_page.draw(rows, tmp_path / "crops.png")
    assert (tmp_path / "crops.png").stat().st_size > 10_000
