"""The contrast: its cells and runs, the policies of both families, and the page."""

import json

import numpy as np
import pytest

from model_port.layout import RESULTS_FILE
from model_port.processing import VisionContract, settled_size
from paravt_jax.run.log import METRICS_FILE
from rollout.chat import Chat
from scripts.miniature import contrast_page
from scripts.miniature.cells import METRICS, read_rows
from scripts.miniature.contrast import ARMS, BEFORE_SFT, CURVES, FAMILIES, POLICIES, PRIORS, TRAINING, Contrast, Policy
from scripts.miniature.model import make_model
from scripts.miniature.traces import rows_of
from scripts.miniature.world import FRAME_PX

STRONG, WEAK = (Policy("qwen2_5_vl", prior) for prior in PRIORS)


def traces_of(policy: Policy) -> list[list[str]]:
    """Returns the assistant's turns in the pretraining's dialogues about a question."""
    world = policy.pretraining
    scenes = [world.scene(0, number) for number in range(200)]
    rows = rows_of(scenes, world.trace_budgets, world.mixture(scenes, "tool"), 0, world.questions)
    asked = [row["messages"] for row in rows if "between" in str(row["messages"][0]["content"])]
    return [[message["content"] for message in each if message["role"] == "assistant"] for each in asked]


def test_a_prior_is_the_share_of_calls_before_sft_in_its_native_form():
    strong, weak = map(traces_of, (STRONG, WEAK))
    shares = [np.mean([len(turns) > 1 for turns in each]) for each in (strong, weak)]
    assert shares == pytest.approx([*PRIORS.values()], abs=0.05) and shares[0] > 0.5
    assert "<tool_call>" in str(weak)
    thinking = [
        [np.mean(["think>" in str(turns) for turns in each if (len(turns) > 1) == calls]) for calls in (0, 1)]
        for each in (strong, weak)
    ]
    assert thinking == [pytest.approx([0.5, 0.0], abs=0.1)] * 2


@pytest.mark.slow
def test_all_cells_have_the_same_sft_and_rl_after_their_own_pretraining(tmp_path):
    plans = [Contrast.of_policy(tmp_path, policy, 1) for policy in POLICIES]
    assert len({plan.base.directory for plan in plans}) == len(POLICIES) == 4
    assert len({str(plan.own.world) for plan in plans}) == len({plan.own.videos for plan in plans}) == 1
    for plan in plans:
        pretraining, sft = (experiment.cold_start("sft") for experiment in (plan.base, plan.own))
        assert f"model.path={pretraining.done.parent}" in sft.settings and sft.num_steps < pretraining.num_steps
        jobs = plan.jobs()
        assert jobs[0] == pretraining
        assert [job.name for job in jobs if job.kind == "train"] == [f"{arm}/seed1" for arm in ARMS]


@pytest.mark.parametrize("family", FAMILIES)
def test_both_families_see_a_frame_as_one_token_and_a_tool_as_its_name(tmp_path, family):
    make_model(tmp_path / "m", 0, family)
    contract, chat = VisionContract.from_hf(tmp_path / "m"), Chat.from_hf(tmp_path / "m")
    height, width = settled_size(FRAME_PX, FRAME_PX, contract)
    assert height * width == chat.token_px**2
    tools = [{"type": "function", "function": {"name": "crop_video", "description": "long"}}]
    prompt = chat.decode(chat.prompt([{"role": "user", "content": "Look."}], tools))
    assert prompt == (
        "<|im_start|>system\ntool: crop_video<|im_end|>\n<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_rows_have_all_evaluations_and_the_steps_of_the_trainings(tmp_path):
    runs = Contrast.of_policy(tmp_path, WEAK, 1)
    scores = {"strict": {"interval_95": [0.1, 0.3]}}
    metrics = dict.fromkeys(METRICS.values(), 0.2)
    cell = {"dispatch": "parallel", "frame_budget": 4, "metrics": metrics, "scores": scores, "n": {"rows": 64}}
    for experiment, name in ((runs.base, "sft"), (runs.own, "sft"), (runs.own, "grpo/seed1")):
        (directory := experiment.directory / "eval" / name).mkdir(parents=True)
        (directory / RESULTS_FILE).write_text(json.dumps({"cells": [cell]}))
    (trained := runs.own.directory / "grpo" / "seed1").mkdir(parents=True)
    steps = [{"step": n} | {f"rollout/{name}": n / 10 for name in CURVES.values()} for n in (1, 2, 3)]
    (trained / METRICS_FILE).write_text("".join(json.dumps(step) + "\n" for step in steps))
    *evaluated, training = runs.rows()
    assert [row["arm"] for row in evaluated] == [BEFORE_SFT, "sft", "grpo"]
    assert all((row["family"], row["prior"], row["seed"]) == ("qwen2_5_vl", "weak", 1) for row in evaluated)
    assert (training["arm"], training["dispatch"], training["kappa"]) == ("grpo", TRAINING, [0.1, 0.2, 0.3])


@pytest.mark.slow
def test_the_page_has_the_numbers_and_the_figure_of_its_data(tmp_path):
    rows, page = read_rows(contrast_page.MEASURED), contrast_page.PAGE.read_text()
    assert contrast_page.with_results(page, rows) == page, "run python -m scripts.miniature.contrast_page"
    assert "](contrast.png)" in page and page.count("\n| strong, Qwen3-VL |") == len(contrast_page.STAGES)
    contrast_page.draw(rows, tmp_path / "contrast.png")
    assert (tmp_path / "contrast.png").stat().st_size > 10_000
