"""Qwen2.5-VL in every command: it is trained, evaluated, exported and served, by the embedded engine."""

import json
import urllib.request
from pathlib import Path

import forked
import hosts as several
import pytest
from training import QUICK, ROOT, SMOKE, metrics_of

from scripts.miniature.model import make_model
from scripts.miniature.traces import Mixture, rows_of
from scripts.miniature.world import make_world, questions, rl_row, write_rows

FAMILY = "qwen2_5_vl"
MINIATURE = ROOT / "configs" / "miniature"


def run(module: str, *arguments: object) -> str:
    done = forked.run(module, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("world")
    scenes = make_world(directory, 0, 2)
    write_rows(directory / "sft.jsonl", rows_of(scenes, (4, 8), Mixture(), 0))
    write_rows(directory / "eval.jsonl", [rl_row(question) for question in questions(scenes[0])[:2]])
    make_model(directory / "tiny.hf", family=FAMILY)
    return directory


def usage_of(url: str, model: str, video: Path) -> dict[str, int]:
    """Returns the usage of an answer of at most eight tokens."""
    parts = [{"type": "video_url", "video_url": {"url": str(video)}}, {"type": "text", "text": "What colour is it?"}]
    body = json.dumps({"model": model, "max_tokens": 8, "messages": [{"role": "user", "content": parts}]})
    request = urllib.request.Request(f"{url}/chat/completions", body.encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)["usage"]


@pytest.mark.nightly
def test_qwen2_5_vl_is_served(world, tmp_path):
    port, output = several.free_port(), tmp_path / "output"
    arguments = ["--model", str(world / "tiny.hf"), "--port", str(port), "--video-root", str(world), "--frames", "2"]
    process = forked.start("paravt_jax.serve", arguments, str(output))
    try:
        forked.wait_until(lambda: f":{port}/v1" in output.read_text(), process, output)
        usage = usage_of(f"http://127.0.0.1:{port}/v1", str(world / "tiny.hf"), next(world.rglob("*.mp4")))
        assert usage["completion_tokens"] > 0
    finally:
        process.terminate()
        process.join(30)
    assert process.exitcode == 0, output.read_text()


@pytest.mark.nightly
def test_a_cold_start_is_trained_evaluated_exported_and_asked(world, tmp_path):
    video, trained = next(world.rglob("*.mp4")), tmp_path / "trained.hf"
    data = [f"data.train={world / 'sft.jsonl'}", "data.validation=", f"model.path={world / 'tiny.hf'}"]
    sizes = ["sft.num_steps=1", "sft.rows_per_step=2", "pack.num_rows=2"]
    run("paravt_jax.sft", "--config", MINIATURE / "sft.yaml", f"run_dir={tmp_path / 'sft'}", *data, *sizes)
    settings = [f"run_dir={tmp_path / 'rl'}", f"model.path={tmp_path / 'sft' / 'checkpoints' / '1'}"]
    run("paravt_jax.train", "--config", SMOKE, *QUICK, *settings, "train.num_steps=1")
    (step,) = metrics_of(tmp_path / "rl")
    assert step["mismatch/behavior_kl"] < 1e-6
    checkpoint = tmp_path / "rl" / "checkpoints" / "1"
    settings = [f"run_dir={tmp_path / 'eval'}", f"model.path={checkpoint}", f"data.validation={world / 'eval.jsonl'}"]
    settings += ["eval.frame_budgets=[4]", "rollout.max_new_tokens=16", "engine.max_rows=8"]
    assert "parallel" in run("paravt_jax.eval", "--config", MINIATURE / "eval.yaml", *settings)
    run("model_port.export", "--src", checkpoint, "--dst", trained)
    assert json.loads((trained / "config.json").read_text())["model_type"] == FAMILY
    answer = json.loads(run("paravt_jax.ask", video, "What colour is it?", "--model", trained, "--frames", 2, "--json"))
    assert answer["num_sampled_tokens"] > 0
