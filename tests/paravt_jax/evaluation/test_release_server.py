"""The released protocol against a real SGLang server: all splits in a batch that is killed, and a dying server."""

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import hosts as several
import pytest
from forked import forks, wait_until
from processes import Served, served
from published import make_copy_with, write_film

from paravt_jax.config import EvalConfig, load_config
from paravt_jax.data.splits import SPLITS
from paravt_jax.eval import run_eval
from paravt_jax.evaluation.batch import FOLDERS
from paravt_jax.prompts import to_yaml
from rollout.endpoint.client import EndpointClient
from rollout.endpoint.errors import EndpointError
from rollout.endpoint.servers import endpoint_settings
from rollout.server import sidecar_python

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
TEXTS = json.loads((Path(__file__).parent / "release_golden.json").read_text())["texts"]
MODEL, NUM_ROWS = "tiny/model", 2
CONTEXT = ("--context-length", "16384", "--max-total-tokens", "32768")  # an overview has 6,300 tokens
CALL = '<tool_call>{"arguments": {"start_time": 0, "end_time": 2}}</tool_call>'
CONFIG = """
engine: {{kind: openai, urls: [{urls}], model: {model}}}
eval: {{protocol: release, mode: agentic_general, channel: image_url, release_texts: {texts}}}
video: {{num_workers: 1}}
"""


@contextmanager
def endpoint(model: Path) -> Iterator[Served]:
    """Starts a server like engine.serve_with, with a context large enough for overviews."""
    options = dict(device="cpu", dtype="float32", context_length=4096, gpus=[], num_servers=1)
    (settings,) = endpoint_settings("sglang", model, MODEL, **options)
    with served(replace(settings, python=sidecar_python()), *CONTEXT) as server:
        yield replace(server, url=f"{server.url}/v1")


@pytest.fixture(scope="module")
def server(tiny_hf) -> Iterator[Served]:
    with endpoint(tiny_hf) as started:
        yield started


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A copy of every split, whose videos have 66 frames."""
    root = tmp_path_factory.mktemp("data")
    film = write_film(root / "film.mp4")
    for split in SPLITS:
        make_copy_with(film, split, root / FOLDERS.get(split, split), NUM_ROWS)
    (root / "release.yaml").write_text(to_yaml(TEXTS, "Stand-ins."))
    return root


async def call_first(client: EndpointClient, messages: list[dict[str, Any]], *, max_tokens: int, **request: Any) -> Any:
    """Replaces the first turn by a call, because the random model makes none."""
    reply = await COMPLETE(client, messages, max_tokens=min(max_tokens, 8), **request)
    return replace(reply, text=CALL, finish="stop") if len(messages) == 2 else reply


COMPLETE = EndpointClient.complete


def evaluate(output: str, arguments: list[str]) -> None:
    EndpointClient.complete = call_first  # type: ignore[method-assign]
    for name, split in SPLITS.items():
        SPLITS[name] = replace(split, num_samples=NUM_ROWS)
    with Path(output).open("a") as file, redirect_stdout(file), redirect_stderr(file):
        several.command("paravt_jax.eval", arguments, {})


def lines_of(run_dir: Path) -> list[bytes]:
    file = run_dir / "samples_parallel_64.jsonl"
    return file.read_bytes().splitlines() if file.exists() else []


def test_a_killed_batch_of_all_splits_resumes_and_draws_the_table(server, data, tmp_path):
    settings = dict(urls=server.url, model=MODEL, texts=data / "release.yaml")
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "row.yaml").write_text(CONFIG.format(**settings))
    arguments = ["batch", str(tmp_path / "rows"), "--splits", "all", "--run-dir", str(tmp_path / "runs")]
    arguments += ["--data-root", str(data)]
    runs, output = tmp_path / "runs" / "row", tmp_path / "output"
    killed = forks.Process(target=evaluate, args=(str(output), arguments))
    killed.start()
    wait_until(lambda: lines_of(runs / "longvideobench"), killed, output)
    killed.kill()
    killed.join()
    before = {split: lines_of(runs / split) for split in SPLITS}
    assert len(before["videomme"]) == NUM_ROWS and not before["charades"]
    resumed = forks.Process(target=evaluate, args=(str(output), arguments))
    resumed.start()
    resumed.join(300)
    assert resumed.exitcode == 0, output.read_text()[-3000:]
    for split in SPLITS:
        lines, cell = lines_of(runs / split), json.loads((runs / split / "cell_parallel_64.json").read_text())
        assert lines[: len(before[split])] == before[split] and len(lines) == NUM_ROWS, split
        assert (cell["protocol"], cell["n"]["missing"], cell["frames"]["min"]) == ("release", {}, 64), split
        assert cell["metrics"]["tool_calls_mean"] == 1 and cell["crop_frames"]["min"] == 2, split
    assert f"| ours: {MODEL}, release's protocol, agentic, release |" in output.read_text()


def config_of(data: Path, run_dir: Path, urls: str, *overrides: str) -> EvalConfig:
    file = run_dir.with_suffix(".yaml")
    file.write_text(CONFIG.format(urls=urls, model=MODEL, texts=data / "release.yaml"))
    settings = [f"run_dir={run_dir}", "data.split=lvbench", f"data.validation={data / 'lvbench'}", *overrides]
    return load_config(file, *settings, schema=EvalConfig)


def test_a_model_missing_on_a_real_server_is_a_one_line_error_before_the_first_sample(server, data, tmp_path):
    with pytest.raises(EndpointError, match=rf"does not serve engine\.model=other; it serves {MODEL}$"):
        asyncio.run(run_eval(config_of(data, tmp_path / "run", server.url, "engine.model=other")))


def test_a_real_server_without_a_video_decoder_is_a_one_line_error_before_the_first_sample(server, data, tmp_path):
    charades = ["data.split=charades", f"data.validation={data / 'charades'}", "eval.channel=video_url"]
    with pytest.raises(EndpointError, match=r"eval\.channel=video_url needs a server that can read .* and decode it"):
        asyncio.run(run_eval(config_of(data, tmp_path / "run", server.url, *charades)))


def test_the_other_real_server_continues_when_one_is_killed(server, tiny_hf, data, tmp_path, monkeypatch, capsys):
    async def killing(client: EndpointClient, messages: list[dict[str, Any]], **request: Any) -> Any:
        reply = await call_first(client, messages, **request)
        if len(messages) == 2 and request["affinity"] and victim.command.poll() is None:
            victim.command.kill()
            await asyncio.to_thread(victim.command.wait)
        return reply

    monkeypatch.setattr(EndpointClient, "complete", killing)
    monkeypatch.setattr(EndpointClient, "_preferred", lambda client, servers, affinity: servers[0])
    with endpoint(tiny_hf) as victim:
        (cell,) = asyncio.run(run_eval(config_of(data, tmp_path / "run", f"{victim.url},{server.url}")))
    assert cell["n"]["answered"] + cell["n"]["unanswered"] == NUM_ROWS and cell["n"]["missing"] == {}
    assert len(lines_of(tmp_path / "run")) == NUM_ROWS
    assert f"{victim.url} cannot be reached: " in capsys.readouterr().err
