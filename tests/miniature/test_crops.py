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
from scripts.miniature import crops, crops_page
from scripts.miniature.cells import read_rows
from scripts.miniature.crops import CELLS, Crops, Player, summary
from scripts.miniature.dials import load_world
from scripts.miniature.model import make_model
from scripts.miniature.traces import PLAYS, rows_of
from scripts.miniature.world import MAX_WINDOWS, WINDOW_S, questions

WORLD = load_world("crops")
BUDGET = 8


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    made = Crops(tmp_path_factory.mktemp("crops"), WORLD)
    make_model(made.model)
    return made


def open_player(study: Crops) -> tuple[Player, ScriptedEngine]:
    """A player whose engine acts like a perfect policy: it reads windows and limit in the prompt."""
    *_, job = study.experiment.jobs()
    config, chat = load_config(job.config, *job.settings, schema=EvalConfig), Chat.from_hf(study.model)

    async def reply(request) -> list[int]:
        text = chat.decode(request.ids)
        start_s, end_s = map(int, re.findall(r"from (\d+) to (\d+) seconds", f"{text} from 0 to 8 seconds")[0])
        windows = [(second, second + WINDOW_S) for second in range(start_s, end_s, WINDOW_S)]
        made = text.count("<tool_response>")
        if "Segment:" in text:
            turn = "red from 0 to 2 seconds."
        elif "calls a turn" not in text or made == len(windows):
            turn = f"</think>\n<answer>{' '.join(['red'] * len(windows))}</answer>"
        else:
            chosen = windows if "Up to 5" in text else windows[made : made + 1]
            arguments = '{{"video_path": "video.mp4", "start_time": {}, "end_time": {}}}'
            calls = (f'{{"name": "crop_video", "arguments": {arguments.format(*window)}}}' for window in chosen)
            turn = "</think>\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
        return chat.encode(f"{turn}<|im_end|>").tolist()

    engine = ScriptedEngine(reply)
    agent = Agent(engine, FakeFrames(), chat, config.rollout)
    renderer = TraceRenderer(agent.frames, chat, VisionContract.from_hf(study.model), agent.config)
    return Player(RolloutWorker(agent, config.reward, None, 0), renderer, study.directory, BUDGET), engine


def red(question):
    return replace(question, answer=" ".join(["red"] * len(question.windows_s)))


@pytest.mark.parametrize("n", [1, 2, 5])
def test_rows_count_turns_calls_and_the_visual_tokens_of_the_largest_context(study, n):
    player, _ = open_player(study)
    expected = {"parallel": (2, n, 8), "sequential": (n + 1, n, 8), "one context": (1, 0, 8 + 8 * n)}
    for play in PLAYS:
        (row,) = asyncio.run(player.episodes(play, [red(question) for question in study.questions([3], n)]))
        assert (row["turns"], row["calls"], row["visual_tokens"]) == expected[play]
        assert row["accuracy"] == 1 and row["video"] == 3 and row["seconds"] > 0


@pytest.mark.parametrize("play", PLAYS)
def test_an_episode_starts_with_the_prompt_of_the_cold_starts_traces(study, play):
    fracs = {"sequential_frac": float(play == "sequential"), "one_context_frac": float(play == "one context")}
    scene = WORLD.scene(0, 0)
    row = rows_of([scene], [BUDGET], replace(WORLD.traces, **fracs), 0, WORLD.questions)[2]
    sft = study.experiment.cold_start("sft")
    player, engine = open_player(study)
    config = load_config(sft.config, *sft.settings, schema=SftConfig).rollout
    renderer = TraceRenderer(player.worker.agent.frames, player.worker.agent.chat, player.renderer._contract, config)
    path = str(player.videos / scene.video)
    rendered = asyncio.run(renderer.render(read_trace(row, lambda _: path), BUDGET))
    asyncio.run(player.episode(play, questions(scene, WORLD.questions)[2]))
    prompt = rendered.ledger.segments[0]
    first = engine.requests[0]
    assert first.ids[: len(prompt.ids)].tolist() == prompt.ids.tolist()
    assert [p.key for p in first.pictures] == [p.key for p in prompt.pictures]


def test_a_summary_has_means_and_an_interval_over_videos():
    row = {"visual_tokens": 8, "turns": 2, "calls": 3}
    own = summary([row | {"accuracy": float(video % 4 > 0), "video": video} for video in range(100)])
    low, high = own["interval_95"]
    assert own["accuracy"] == 0.75 and own["turns"] == 2 and own["episodes"] == 100
    assert 0.6 < low < 0.75 < high < 0.9


def test_timed_cells_share_no_video_with_each_other_or_the_warm_up(study):
    seen = []

    class Watched:
        async def episode(self, play, question):
            seen.append(question.scene.number)
            return {"seconds": 1.0}

        async def episodes(self, play, chosen):
            return [await self.episode(play, question) for question in chosen]

    rows = asyncio.run(study.times(Watched()))
    warm, timed = seen[: -len(CELLS) * crops.NUM_TIMED], seen[-len(CELLS) * crops.NUM_TIMED :]
    assert len(rows) == len(CELLS) == len(PLAYS) * MAX_WINDOWS
    assert len(timed) == len({*timed}) and not {*timed} & {*warm} and len({*warm}) == crops.MAX_IN_FLIGHT


def test_the_page_has_the_numbers_and_the_figure_of_its_data(tmp_path):
    rows = read_rows(crops_page.MEASURED)
    assert [(row["windows"], row["play"]) for row in rows] == [*CELLS]
    assert all(row["episodes"] >= 128 for row in rows)
    page = crops_page.PAGE.read_text()
    changed = crops_page.with_table(page, "windows", crops_page.table(rows))
    assert changed == page, "run python -m scripts.miniature.crops_page"
    assert "](crops.png)" in page
    crops_page.draw(rows, tmp_path / "crops.png")
    assert (tmp_path / "crops.png").stat().st_size > 10_000
