"""A model carries how it is asked; what a stranger's says is checked, and a run that differs says so."""

import asyncio
import json
import shutil

import pytest

from model_port.hf_files import RECIPE_FILE, read_side_files
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.run.policy import policy_of
from paravt_jax.run.recipe import Recipe, differences, read_recipe, recipe_of
from rollout.episode_config import EpisodeConfig

SETTINGS = ("data.validation=x.jsonl", "video.min_pixels=1024", "video.max_pixels=4096", "rollout.max_parallel=3")


@pytest.fixture
def model(tiny_hf, tmp_path):
    return shutil.copytree(tiny_hf, tmp_path / "model")


def write(model, **record):
    (model / RECIPE_FILE).write_text(json.dumps(record))


def opened(model, run_dir, *settings):
    config = load_config(None, f"model.path={model}", f"run_dir={run_dir}", *SETTINGS, *settings, schema=EvalConfig)
    return asyncio.run(policy_of(config, run_dir))


def test_a_run_writes_how_its_model_is_asked_and_it_reads_back_the_same(model, tmp_path):
    policy = opened(model, tmp_path / "run", "rollout.prompts.system=You {{see}}.", "rollout.temperature=0.7")
    recipe = read_recipe(policy.hf_files)
    assert recipe is not None and recipe.rollout.prompts.system == "You {{see}}."
    assert (recipe.rollout.max_parallel, recipe.max_pixels, recipe.num_frames) == (3, 4096, 64)
    assert RECIPE_FILE in read_side_files(policy.hf_files)  # which checkpoints and exports carry


def test_a_model_without_one_has_none(model):
    assert read_recipe(model) is None


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"rollout": {"tools": ["evil.py:Tool"]}}, "no code is loaded that a model names"),
        ({"rollout": {"prompts_file": "/etc/passwd"}}, "prompts_file is not a setting"),
        ({"rollout": {"prompts": {"system": "${oc.env:HOME}"}}}, "nothing there may stand for something else"),
        ({"rollout": {"max_parallel": "many"}}, "could not be converted to Integer"),
        ({"rollout": {"max_parallel": 0}}, "must be at least 1"),
        ({"rollout": {"max_context_tokens": 8}}, "leaves no room for a turn"),
        ({"rollout": []}, r"rollout=\[\] must be an object"),
        (
            {"rollout": {"prompts": {"frame_time": "{time_s:2000000000.1f}"}}},
            "frame_time has the format '2000000000.1f'",
        ),
        ({"rollout": {"prompts": {"frame_time": "{time_s:.2000000000f}"}}}, "frame_time has the format"),
        ({"rollout": {"prompts": {"frame_time": "{time_s:２００００00000}"}}}, "frame_time has the format"),
        ({"rollout": {"prompts": {"frame_time": "{time_s:" + "9" * 5000 + "}"}}}, "frame_time has the format"),
        ({"rollout": {"prompts": {"overview": "{name:{num_frames}}"}}}, "overview has the format .* no braces"),
        ({"rollout": {"prompts": {"with_tool": "{question}" * 65}}}, "with_tool has 65 placeholders, more than 64"),
        ({"rollout": {"prompts": {"system": "x" * 100_001}}}, "system has 100001 characters, more than 100000"),
        ({"rollout": {"forced_prefix": "x" * 100_001}}, "forced_prefix has 100001 characters"),
        (
            {"rollout": {"max_context_tokens": 10**12}},
            "rollout.max_context_tokens=1000000000000 must be at most 1048576",
        ),
        ({"rollout": {"max_turns": 10**9}}, "rollout.max_turns=1000000000 must be at most 1024"),
        ({"rollout": {"max_turns": 10**30}}, "rollout.max_turns=10{30} must be at most 1024"),
        ({"rollout": {"tools": 5}}, "rollout.tools=5 must be a list of names"),
        ({"rollout": {"tools": [["crop_video"]]}}, r"rollout.tools=\[\['crop_video'\]\] must be a list of names"),
        ({"rollout": {"prompts": 5}}, "paravt.json: .*(rollout.prompts|Prompts)"),
        ({"num_frames": 10**9}, "video.overview_frames=1000000000 must be at most 4096"),
        ({"max_pixels": 10**12}, "video.max_pixels=1000000000000 must be at most 67108864"),
        ({"num_frames": 0}, "must be at least 1"),
        ({"max_pixels": 1}, "is more than video.max_pixels"),
        ({"colour": "red"}, "colour is not a setting"),
    ],
)
def test_what_a_strangers_model_says_is_refused_in_one_sentence(model, record, said):
    write(model, **record)
    with pytest.raises(ValueError, match=said) as refused:
        read_recipe(model)
    assert str(refused.value).startswith(str(model / RECIPE_FILE)) and "\n" not in str(refused.value)


def test_no_file_of_a_model_is_run(model, tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Tool: pass\n")
    write(model, rollout={"tools": [f"{tmp_path / 'evil.py'}:Tool"]})
    with pytest.raises(ValueError, match="no code is loaded"):
        read_recipe(model)
    assert not (tmp_path / "owned").exists()


def test_a_broken_file_is_named(model):
    for text, said in (
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 10**5, "is not valid JSON"),
    ):
        (model / RECIPE_FILE).write_text(text)
        with pytest.raises(ValueError, match=rf"paravt\.json {said}"):
            read_recipe(model)


def test_a_run_that_asks_otherwise_than_the_model_was_asked_says_so(model, tmp_path, capsys):
    write(model, **Recipe(num_frames=8, rollout=EpisodeConfig(forced_prefix="", dispatch="none")).to_record())
    opened(model, tmp_path / "run")
    said = capsys.readouterr().err
    assert (
        "rollout.forced_prefix='', here it is '<think>\\n'" in said and "rollout.max_parallel=5, here it is 3" in said
    )
    assert "dispatch" not in said and "num_frames" not in said  # which evaluations vary on purpose


def test_an_evaluation_in_another_mode_than_the_model_was_trained_in_says_so(model, tmp_path, capsys):
    write(model, **Recipe().to_record())
    opened(model, tmp_path / "run", "eval.mode=direct", "eval.dispatches=[none]")
    assert "mode='agentic', here it is 'direct'" in capsys.readouterr().err


def test_a_run_that_asks_as_the_model_was_asked_says_nothing(model):
    config = load_config(None, *SETTINGS, schema=EvalConfig)
    (model / RECIPE_FILE).write_bytes(recipe_of(config).to_bytes())
    assert list(differences(model, recipe_of(config))) == []
