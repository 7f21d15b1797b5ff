"""Every example of docs/extend.md prints the output on the page; test_docs.py uses all of them in runs."""

import asyncio
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
from training import QUICK, SMOKE

from paravt_jax import train
from paravt_jax.config import EngineConfig
from paravt_jax.data.splits import split_named
from paravt_jax.sampling.engines import open_engine

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extend.md"
EXAMPLE = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```\n\n```\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES = {name: (text, output) for name, text, output in EXAMPLE.findall(PAGE.read_text())}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_the_output_below_it(name, tmp_path, monkeypatch, capsys):
    text, output = EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    runpy.run_path(name, run_name="__main__")
    assert capsys.readouterr().out == output


def test_every_section_has_an_example():
    names = ("loss", "reward", "score", "tool", "split", "size", "engine")
    assert list(EXAMPLES) == [f"own_{name}.py" for name in names]


RECORDS_PUBLISHES = """
async def publish(self, weights, version):
    self.version = version
    with open("published", "a") as file:
        print(version, sum(tensor.size for _, tensor in weights.tensors()), file=file)
GuessingEngine.publish = publish
"""


@pytest.mark.slow
def test_a_run_trains_with_a_user_engine_and_publishes_every_version_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own_engine.py").write_text(EXAMPLES["own_engine.py"][0] + RECORDS_PUBLISHES)
    settings = ["engine.kind=own_engine.py:open_engine", "mismatch.max_kl=1000", "run_dir=run", "train.num_steps=1"]
    monkeypatch.setattr(sys, "argv", ["train", "--config", str(SMOKE), *QUICK, *settings, "rollout.max_new_tokens=64"])
    train.main()
    assert Path("published").read_text().splitlines() == ["0 1036896", "1 1036896"]
    episodes = [json.loads(line) for line in Path("run/episodes/000001.jsonl").read_text().splitlines()]
    assert len(episodes) == 4 and all("I guess." in episode["turns"][0]["text"] for episode in episodes)


def test_an_invalid_extension_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("SPLIT = 5\n\ndef open_engine(settings, policy):\n    return 5\n")
    message = r"engine\.kind=vllm is unknown; expected jax, sglang, openai or path/to/file\.py:"
    with pytest.raises(ValueError, match=message):
        EngineConfig(kind="vllm")
    with pytest.raises(ValueError, match=r"data\.split=own\.py:SPLIT is not a PublicSplit"):
        split_named("own.py:SPLIT")
    own = EngineConfig(kind="own.py:open_engine")
    with pytest.raises(ValueError, match=r"engine\.kind=own\.py:open_engine returned int, expected an Engine"):
        asyncio.run(open_engine(own, None, None, None, 0, print))
