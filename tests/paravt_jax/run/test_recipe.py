"""A model's files have its recipe. Untrusted recipes are checked, and a run with other settings logs them."""

import asyncio
import json
import shutil

import pytest

from model_port.hf_files import RECIPE_FILE, read_side_files
from paravt_jax.config import EvalConfig, load_config
from paravt_jax.run.policy import policy_of
from paravt_jax.run.recipe import Recipe, differences, read_recipe, recipe_of
from rollout.episode_config import EpisodeConfig
from rollout.prompts import Prompts
from rollout.tools import CROP_VIDEO

SETTINGS = ("data.validation=x.jsonl", "video.max_pixels=4096", "rollout.max_parallel=3")


@pytest.fixture
def model(tiny_hf, tmp_path):
    return shutil.copytree(tiny_hf, tmp_path / "model")


def write(model, **record):
    (model / RECIPE_FILE).write_text(json.dumps(record))


def open_model(model, run_dir, *settings):
    config = load_config(None, f"model.path={model}", f"run_dir={run_dir}", *SETTINGS, *settings, schema=EvalConfig)
    return asyncio.run(policy_of(config, run_dir))


def test_a_runs_recipe_is_written_and_read(model, tmp_path):
    policy = open_model(model, tmp_path / "run", "rollout.prompts.system=You {{see}}.", "rollout.temperature=0.7")
    recipe = read_recipe(policy.hf_files)
    assert recipe is not None and recipe.rollout.prompts.system == "You {{see}}."
    assert (recipe.rollout.max_parallel, recipe.max_pixels, recipe.num_frames) == (3, 4096, 64)
    assert RECIPE_FILE in read_side_files(policy.hf_files)  # checkpoints and exports include these


def test_a_model_without_a_recipe_has_none(model):
    assert read_recipe(model) is None


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"rollout": {"prompts_file": "/etc/passwd"}}, "prompts_file is not a setting"),
        ({"rollout": {"prompts": {"system": "${oc.env:HOME}"}}}, "contains \\$\\{…\\}, which this file must not"),
        ({"rollout": {"max_parallel": "many"}}, "rollout.max_parallel: Value 'many' .* converted to Integer"),
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
        ({"rollout": {"max_context_tokens": 10**12}}, "rollout.max_context_tokens=10{12} must be at most 1048576"),
        ({"rollout": {"max_turns": 10**9}}, "rollout.max_turns=1000000000 must be at most 1024"),
        ({"rollout": {"max_turns": 10**30}}, "rollout.max_turns=10{30} must be at most 1024"),
        ({"rollout": {"tools": 5}}, "rollout.tools=5 must be a list of names"),
        ({"rollout": {"tools": [["crop_video"]]}}, r"rollout.tools=\[\['crop_video'\]\] must be a list of names"),
        ({"rollout": {"prompts": 5}}, "paravt.json: .*(rollout.prompts|Prompts)"),
        ({"num_frames": 10**9}, "video.overview_frames=1000000000 must be at most 4096"),
        ({"max_pixels": 10**12}, "video.max_pixels=1000000000000 must be at most 67108864"),
        ({"num_frames": 0}, "must be at least 1"),
        ({"max_pixels": 1}, "video.max_pixels=1 must be at least 784"),
        ({"colour": "red"}, "colour is not a setting"),
        ({"rollout": {"top_p": 1.0}}, "rollout.top_p was removed: runs sample from all tokens"),
    ],
)
def test_invalid_recipes_are_rejected_with_one_error(model, record, message):
    write(model, **record)
    with pytest.raises(ValueError, match=message) as error:
        read_recipe(model)
    assert str(error.value).startswith(str(model / RECIPE_FILE)) and "\n" not in str(error.value)


@pytest.mark.parametrize(("beside", "dispatch"), [([], "none"), (["zoom_frame"], "parallel")])
def test_code_in_a_models_files_never_runs(model, tmp_path, capsys, beside, dispatch):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass Tool: pass\n")
    write(model, rollout={"tools": [*beside, f"{tmp_path / 'evil.py'}:Tool"]})
    recipe = read_recipe(model)
    assert recipe is not None and (recipe.rollout.tools, recipe.rollout.dispatch) == (beside or [CROP_VIDEO], dispatch)
    assert "evil.py:Tool is left out of rollout.tools, because a model's files must not" in capsys.readouterr().err
    assert not (tmp_path / "owned").exists()


def test_invalid_json_is_reported_with_its_file(model):
    errors = {"{": "is not valid JSON", "[]": "must hold a JSON object", "[" * 10**5: "is not valid JSON"}
    for text, message in errors.items():
        (model / RECIPE_FILE).write_text(text)
        with pytest.raises(ValueError, match=rf"paravt\.json {message}"):
            read_recipe(model)


def test_settings_that_differ_from_the_recipe_are_one_line(model, tmp_path, capsys):
    rollout = EpisodeConfig(forced_prefix="", dispatch="none", prompts=Prompts(system="Look closely. " * 9))
    write(model, **Recipe(num_frames=8, rollout=rollout).to_record())
    open_model(model, tmp_path / "run")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if RECIPE_FILE in line]
    assert "; rollout.max_parallel: 5 -> 3; " in line and "rollout.forced_prefix: '' -> '<think>\\n'" in line
    assert line.endswith("; rollout.prompts.system")  # a long text
    assert "dispatch" not in line and "num_frames" not in line  # evaluations vary these on purpose


def test_an_evaluation_in_another_mode_logs_the_difference(model, tmp_path, capsys):
    write(model, **Recipe().to_record())
    open_model(model, tmp_path / "run", "eval.mode=direct", "eval.dispatches=[none]")
    line = capsys.readouterr().err
    assert f"{model / RECIPE_FILE}: this run has other settings" in line and "mode: 'agentic' -> 'direct'" in line


def test_equal_settings_are_not_logged(model):
    config = load_config(None, *SETTINGS, schema=EvalConfig)
    (model / RECIPE_FILE).write_bytes(recipe_of(config).to_bytes())
    assert differences(model, recipe_of(config)) == ""
