"""Reading, merging and checking a run's settings."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from model_port.json_files import flattened
from paravt_jax.config import Config, EvalConfig, SftConfig, keys, load_config, to_record
from paravt_jax.config.changed_keys import FIXED, REMOVED, RENAMED
from paravt_jax.learner import advantages
from paravt_jax.rewards import judge, terms
from paravt_jax.run.directory import changed_settings
from paravt_jax.run.recipe import recipe_of
from rollout.endpoint import client
from scripts.miniature import arms

CONFIGS = Path(__file__).parents[2] / "configs"


def schema_of(path: Path) -> type:
    if "reproduce" in path.parts:
        return EvalConfig
    words = path.stem.split("_")
    return SftConfig if "sft" in words else EvalConfig if words[0] == "eval" else Config


RUNS = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent.name != "launch")


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_config_loads_and_its_header_has_command_hardware_time_and_result(path):
    load_config(path, schema=schema_of(path))
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    assert f"--config configs/{path.relative_to(CONFIGS)}" in "\n".join(head)
    assert all(word in "\n".join(head) for word in ("Hardware:", "Time:", "Expected"))


@pytest.mark.slow
def test_a_record_equals_omegaconfs_settings():
    for path in RUNS:
        config = load_config(path, schema=schema_of(path))
        used = OmegaConf.to_container(OmegaConf.structured(config))
        assert to_record(config) == json.loads(json.dumps(used), parse_constant=str), path


def test_the_readme_of_the_configs_lists_every_file():
    files = {path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml")}
    listed = re.findall(r"^\| \[`(.+?)`\]\(\1\) \|", (CONFIGS / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(files)


def test_the_published_hyper_parameters_are_in_the_8b_files():
    config = load_config(CONFIGS / "paragrpo_8b.yaml")
    train = config.train
    assert (train.num_steps, train.group_size, train.prompts_per_step, train.max_staleness) == (54, 8, 7, 2)
    assert (config.rollout.temperature, config.rollout.max_new_tokens) == (0.7, 2048)
    assert (config.rollout.max_turns, config.rollout.max_parallel, config.rollout.subagent_new_tokens) == (3, 5, 512)
    assert (config.video.frame_budgets, config.video.overview_frames) == ([4, 8, 16, 32, 64], 64)
    assert (config.optim.learning_rate, config.optim.weight_decay, config.optim.max_grad_norm) == (2e-6, 0.01, 1.0)
    clip = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0}
    assert (config.loss.name, config.loss.all_params) == ("para_grpo", clip)
    assert (config.loss.kl_coef, config.loss.correction) == (0.01, "token_mis")
    assert (config.reward.anchor_weight, config.reward.unclosed_penalty, config.reward.format_weight) == (0.5, 0.3, 1.0)
    reward = config.reward
    assert (reward.tool, reward.format, reward.tool_pay) == ("published", "published", (0.3, 0.5, 0.0))


@pytest.mark.parametrize("name", ["grpo_8b", "paragrpo_8b", "paragrpo_8b_recommended"])
def test_open_questions_are_scored_by_exact_match_unless_there_is_a_judge(name):
    assert load_config(CONFIGS / f"{name}.yaml").reward.oe_mode == "exact"
    judge = ("reward.oe_mode=llm", "judge.url=http://a/v1", "judge.model=m")
    assert load_config(CONFIGS / f"{name}.yaml", *judge).judge.is_set


def settings_of(file: str, *settings: str) -> dict:
    return flattened(to_record(load_config(CONFIGS / file, *settings)))


def test_the_release_configs_differ_from_ours_as_their_headers_list():
    ours, release = settings_of("8b_8x80gb.yaml"), settings_of("release/paragrpo_8b.yaml")
    differ = {key for key in ours if ours[key] != release[key]} - {"run_dir", "model.path"}
    assert {key for key in differ if not key.startswith("rollout.prompts.")} == {
        *("loss.kl", "reward.oe_mode", "video.frame_budgets", "rollout.overview_fps"),
        *("advantage.credit", "advantage.normalise", "advantage.filter_zero_variance"),
    }
    head = (CONFIGS / "release" / "paragrpo_8b.yaml").read_text().partition("\nrun_dir:")[0]
    assert not [key for key in differ if key.rpartition(".")[2] not in head and key.rpartition(".")[0] not in head]
    grpo = settings_of("release/grpo_8b.yaml")
    assert {key for key in grpo if grpo[key] != release[key]} == {
        *("run_dir", "advantage.credit", "rollout.forced_prefix", "reward.format"),
        *("reward.anchor_weight", "reward.unclosed_penalty"),
    }


ARMS = {
    "grpo": "grpo_8b",
    "anchoring": "ablations/no_gating",
    "gating": "ablations/no_anchoring",
    "para_grpo": "paragrpo_8b",
    "no_tool_reward": "ablations/no_tool_reward",
    "no_penalty": "ablations/no_penalty",
}
# Paths, data, sizes and the machine; a tiny model has a higher learning rate.
SIZES = (
    *("run_dir", "model.", "mesh.", "data.", "engine.", "pack.", "validation.", "checkpoint.", "log."),
    *("video.max_pixels", "video.num_workers", "optim.learning_rate"),
    *("rollout.max_", "rollout.subagent_", "rollout.prompts."),
    *("train.num_steps", "train.prompts_per_step", "train.max_staleness"),
)


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_and_its_miniature_differ_in_size_only(arm):
    small = settings_of("miniature/para_grpo.yaml", *arms.settings_of(arm))
    large = settings_of(f"{ARMS[arm]}.yaml")
    differ = {key: (small[key], large[key]) for key in large if small[key] != large[key]}
    assert {key: values for key, values in differ.items() if not key.startswith(SIZES)} == {}


ANCHORING = {"rollout.forced_prefix", "reward.anchor_weight", "reward.unclosed_penalty"}


@pytest.mark.parametrize(
    ("file", "differs"),
    [
        ("no_anchoring", {*ANCHORING, "reward.tool"}),
        ("no_gating", {"video.frame_budgets", "reward.tool"}),
        ("no_tool_reward", {"reward.tool"}),
        ("no_penalty", {"reward.unclosed_penalty"}),
    ],
)
def test_an_ablation_differs_from_the_full_method_in_the_ablated_settings_only(file, differs):
    full, ablation = settings_of("paragrpo_8b.yaml"), settings_of(f"ablations/{file}.yaml")
    assert {key for key, value in full.items() if ablation[key] != value} == differs | {"run_dir"}


def test_the_recommended_file_differs_from_the_published_one_as_its_header_lists():
    full, other = settings_of("paragrpo_8b.yaml"), settings_of("paragrpo_8b_recommended.yaml")
    differ = {key for key, value in full.items() if other[key] != value}
    reward = {"reward.tool", "reward.format", "advantage.normalise", "advantage.credit"}
    assert differ == {"run_dir", "train.max_resamples", *reward}
    head = (CONFIGS / "paragrpo_8b_recommended.yaml").read_text().partition("\nrun_dir:")[0]
    assert all(f"#   {key}=" in head for key in differ - {"run_dir"})


def test_the_stages_of_the_miniature_have_the_same_prompts_and_pixels():
    sft, rl, held_out = (
        load_config(CONFIGS / "miniature" / f"{name}.yaml", schema=schema)
        for name, schema in (("sft", SftConfig), ("para_grpo", Config), ("eval", EvalConfig))
    )
    assert sft.rollout.prompts == rl.rollout.prompts == held_out.rollout.prompts
    assert rl.rollout == held_out.rollout
    assert {c.video.max_pixels for c in (sft, rl, held_out)} == {1024}


def test_the_config_has_the_published_cold_start():
    config = load_config(CONFIGS / "sft_8b.yaml", schema=SftConfig)
    assert (config.optim.learning_rate, config.optim.schedule) == (2e-5, "cosine")
    assert (config.optim.weight_decay, config.pack.row_tokens, config.sft.num_steps) == (0.01, 8192, 500)
    assert not config.video.frame_budgets and config.video.overview_frames == 64


def test_the_record_of_a_run_loads_as_a_config(tmp_path):
    unusual = ("rollout.forced_prefix='<think>\U0001f600\n'", "optim.learning_rate=2e-6")
    infinite = ("optim.max_grad_norm=inf", "mismatch.max_kl=inf", "loss.correction_bounds.max_weight=inf")
    config = load_config(CONFIGS / "smoke_cpu.yaml", *unusual, *infinite)
    content = json.dumps({"config": to_record(config), "git_commit": None}, allow_nan=False)
    for text in (content.replace('"Infinity"', "Infinity"), content):  # as older versions wrote it
        (tmp_path / "config.json").write_text(text)
        assert load_config(tmp_path / "config.json") == config
        assert changed_settings(to_record(config), tmp_path, {}) == {}
    assert load_config(tmp_path / "config.json", "seed=3").seed == 3
    (tmp_path / "config.json").write_text('{"sft": {"num_steps": 1}}')
    with pytest.raises(ValueError, match=r"config\.json is for python -m paravt_jax\.sft: sft\.num_steps is not a "):
        load_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: invalid YAML: "):
        load_config(tmp_path / "config.json")


MAX_SETTINGS = 115


def test_the_number_of_settings_is_bounded():
    """Each key that some command accepts counts once, a mapping such as loss.params as one."""
    settings = {key for schema in (Config, SftConfig, EvalConfig) for key in keys.keys_of(schema)}
    assert len(settings) <= MAX_SETTINGS


def test_the_error_for_a_renamed_or_removed_key_has_the_new_key_or_the_reason(tmp_path):
    settings = {key for schema in (Config, SftConfig, EvalConfig) for key in keys.keys_of(schema)}
    assert settings >= {new.partition(":")[0] for new in RENAMED.values()}
    assert not settings & {*RENAMED, *REMOVED}
    errors = {key: f"is now {new}" for key, new in RENAMED.items()}
    errors |= {key: f"was removed: {reason}" for key, reason in REMOVED.items()}
    for key, error in errors.items():
        with pytest.raises(ValueError, match=f"^{re.escape(f'{key} {error}')}$"):
            load_config(None, f"{key}=1")
    (tmp_path / "run.yaml").write_text("loss: {kind: dapo}")
    with pytest.raises(ValueError, match=r"run\.yaml, line 1: loss\.kind is now loss\.name$"):
        load_config(tmp_path / "run.yaml")
    with pytest.raises(ValueError, match=r"^loss\.numbers\.clip_low is now loss\.params\.clip_low$"):
        load_config(None, "loss.numbers.clip_low=0.1")


def test_the_values_that_errors_give_for_removed_keys_are_in_use():
    used = {
        "advantage.epsilon": advantages.EPSILON,
        "judge.attempt_deadline_s": judge.ATTEMPT_DEADLINE_S,
        "judge.backoff_s": client.BACKOFF_S,
        "judge.max_attempts": judge.MAX_ATTEMPTS,
        "judge.max_backoff_s": client.MAX_BACKOFF_S,
        "judge.max_concurrent": judge.MAX_CONCURRENT,
        "judge.max_reply_tokens": judge.MAX_REPLY_TOKENS,
        "reward.parts.flow": terms.FLOW,
        "reward.parts.think_closing": terms.THINK_CLOSING,
    }
    assert FIXED | used == FIXED


def test_another_correction_on_the_command_line_starts_from_its_own_bounds(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": to_record(load_config(None))}))
    loss = load_config(tmp_path / "config.json", "loss.correction=icepop").loss
    assert loss.correction_bounds == {"min_weight": 0.5, "max_weight": 5.0}
    assert load_config(tmp_path / "config.json", "loss.correction=none").loss.correction_bounds == {}


SERVERS = ["engine.kind=sglang"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.nsteps=3"], r"train\.nsteps is not a setting \(did you mean train\.num_steps\?\)$"),
        (["learning_rate=1e-5"], r"learning_rate is not a setting \(did you mean optim\.learning_rate\?\)$"),
        (["model.learning_rat=1e-5"], r"learning_rat is not a setting \(did you mean optim\.learning_rate\?\)$"),
        (["optim.lr=1"], r"\(did you mean optim\.learning_rate\?\)$"),
        (["lr=1"], r"\(did you mean optim\.learning_rate\?\)$"),
        (["every_steps=2"], r"\(did you mean validation\.every_steps or checkpoint\.every_steps\?\)$"),
        (["steps=2"], r"mean validation\.every_steps or checkpoint\.every_steps or train\.num_steps\?\)$"),
        (["trian.num_steps=3"], r"\(did you mean train\.num_steps\?\)$"),
        (["rollout.deadline_s=3"], r"\(did you mean rollout\.turn_deadline_s\?\)$"),
        (["seed.x=1"], r"seed\.x is not a setting \(did you mean seed\?\)$"),
        (["reward.parts.answer_closing=0.1"], r"answer_closing is now reward\.format"),
        (["train.bs=1"], r"train\.bs is not a setting \(--show lists all\)$"),
        (["model=3"], r"model is a section; set model\.path, model\.dtype, model\.attention and so on$"),
        (["train.num_steps=6.5"], r"train\.num_steps=6\.5: .*Integer"),
        (["num_steps"], "'num_steps' is not a setting; write it as"),
        (["=3"], "'=3' is not a setting; write it as"),
        (["train.num_steps=[3"], r"^train\.num_steps=\[3: invalid YAML: did not find expected ',' or '\]'"),
        (["engine.kind=vllm"], r"engine\.kind=vllm is unknown; expected jax, sglang, openai or"),
        (["train.group_size=1"], r"train\.group_size=1 must be at least 2"),
        (["loss.clip_high=0.3"], r"loss\.clip_high is not a setting \(did you mean loss\.params\.clip_high\?\)$"),
        (
            ["loss.name=grop"],
            r"loss\.name=grop is unknown, expected para_grpo, grpo, .*, or your own path/to/file\.py:function",
        ),
        (["loss.params.clip=0.3"], r"loss\.params\.clip is not a parameter of loss\.name=para_grpo, "),
        (["loss.params.clip_high=much"], r"loss\.params\.clip_high=much: .*Float"),
        (["loss.name=gspo", "loss.params.clip_low=0.2"], r"loss\.params\.clip_low=0\.2 is a clip for tokens"),
        (["loss.name=dr_grpo"], r"loss\.name=dr_grpo does not divide by the std .* set advantage\.normalise=none"),
        (["train.updates_per_step=8"], r"train\.updates_per_step=8 would leave .*train\.prompts_per_step=7"),
        (["train.updates_per_step=3", "train.max_staleness=4"], "one step ahead become 5 versions old; set it to that"),
        (["train.oversample=8"], r"train\.oversample=8 is more than train\.prompts_per_step=7"),
        (["mesh.fsdp=4"], r"pack\.num_rows=1 must be a multiple of mesh\.data x mesh\.fsdp = 4"),
        (["pack.row_tokens=1024"], r"pack\.row_tokens=1024 cannot hold .*rollout\.max_context_tokens=32768"),
        (["reward.oe_mode=llm"], r"reward\.oe_mode=llm needs judge\.url and judge\.model"),
        (["judge.url=http://a/v1", "judge.model=m"], r"reward\.oe_mode=llm needs judge\.url"),
        (["judge.url=http://a/v1", "reward.oe_mode=llm"], r"judge\.model"),
        (["data.allow_outside=true"], r"data\.allow_outside=true has no effect without data\.video_root"),
        (["video.frame_budgets=[0,4]"], r"video\.frame_budgets=\[0, 4\]"),
        (["video.frame_budgets=[4,4097]"], r"video\.frame_budgets=4097 must be at most 4096"),
        (["video.num_workers=-1"], r"video\.num_workers=-1 must be 0 or more"),
        (["video.max_pixels=400"], r"video\.max_pixels=400 must be at least 784"),
        (
            [*SERVERS, "engine.urls=[localhost:30000]"],
            r"engine\.urls has localhost:30000, which is not a URL; write http://localhost:30000$",
        ),
        ([*SERVERS, "engine.urls=http://a"], r"^engine\.urls=http://a: expected a list, written as \[a, b\]$"),
        (["video.frame_budgets=64"], r"^video\.frame_budgets=64: expected a list, written as \[a, b\]$"),
        (["engine.urls=[http://a]"], r"engine\.urls=.* has no effect with engine\.kind=jax"),
        (["rollout.max_context_tokens=1024"], r"max_context_tokens=1024 leaves no room for .*max_new_tokens=2048"),
        (["rollout.temperature=0"], r"rollout\.temperature=0\.0 must be above 0"),
        (["rollout.temperature=1e-40"], r"rollout\.temperature=1e-40 must be 0 \(greedy\) or at least 1e-06"),
        (["rollout.temperature=inf"], r"rollout\.temperature=inf must be a finite number, 0 or more"),
        (["rollout.turn_deadline_s=0"], r"rollout\.turn_deadline_s=0\.0 must be a finite number above 0"),
        (["rollout.turn_deadline_s=nan"], r"rollout\.turn_deadline_s=nan must be a finite number above 0"),
        (["rollout.turn_deadline_s=inf"], r"rollout\.turn_deadline_s=inf must be a finite number above 0"),
        (["model.path=${oc.env:ABSENT}"], r"^model\.path: KeyError .*'ABSENT' not found\"$"),
        (["rollout.prompts_file=${oc.env:ABSENT}"], r"^rollout\.prompts_file: KeyError .*'ABSENT' not found\"$"),
        (["run_dir="], r"^run_dir is empty; name a directory, for example runs/first$"),
        (["seed=-1"], r"seed=-1 must be 0 or more"),
        (["rollout.tools=[zoom]"], r"^rollout\.tools: there is no tool zoom; use one of crop_video, zoom_frame, "),
        (["rollout.prompts.overview='{nmae}'"], r"^rollout\.prompts\.overview has the placeholder \{nmae\}"),
        (["rollout.dispatch=none"], r"reward\.tool=published has no effect with rollout\.dispatch=none"),
        (["loss.kl=reward", "loss.kl_coef=0"], r"loss\.kl=reward has no effect with loss\.kl_coef=0"),
        (["advantage.credit=sequence", "reward.anchor_weight=0"], r"advantage\.credit=sequence has no effect"),
        (["advantage.credit=span", "reward.anchor_weight=0"], r"advantage\.credit=span has no effect"),
        (["advantage.credit=likelihood", "reward.format_weight=0"], r"has no effect with reward\.format_weight=0"),
        (["reward.plugin=mine.py"], r"reward\.plugin='mine\.py' must be FILE\.py:FUNCTION, for example"),
        (["optim.learning_rate=0"], r"optim\.learning_rate=0\.0 must be a finite number above 0"),
        (["optim.learning_rate=inf"], r"optim\.learning_rate=inf must be a finite number above 0"),
        (["optim.max_grad_norm=0"], r"optim\.max_grad_norm=0\.0 must be above 0"),
        (["optim.weight_decay=-0.01"], r"optim\.weight_decay=-0\.01 must be a finite number, 0 or more"),
        (["optim.weight_decay=inf"], r"optim\.weight_decay=inf must be a finite number, 0 or more"),
        (["lora.rank=-1"], r"lora\.rank=-1 must be 0 or more"),
        (["lora.rank=8", "lora.alpha=0"], r"lora\.alpha=0\.0 must be a finite number above 0"),
        (
            ["lora.rank=8", "optim.train_vision=true"],
            r"lora\.rank=8 trains adapters .* conflicts with optim\.train_vision=true",
        ),
        (["checkpoint.keep=0"], r"checkpoint\.keep=0 must be at least 1"),
        (["loss.params.clip_low=1"], r"loss\.params\.clip_low=1\.0 must be above 0 and below 1"),
        (["loss.params.clip_high=0"], r"loss\.params\.clip_high=0\.0 must be a finite number above 0"),
        (["loss.name=cispo", "loss.params.clip_high=0.2"], r"is not a .* of loss\.name=cispo, which has max_ratio$"),
        (["loss.name=cispo", "loss.params.max_ratio=0.5"], r"loss\.params\.max_ratio=0\.5 must be .* at least 1"),
        (["loss.params.dual_clip=1"], r"loss\.params\.dual_clip=1\.0 must be above 1"),
        (["rollout.tools=[{a: b}]"], r"^rollout\.tools must be a list, written as \[a, b\]$"),
        (["rollout.tools={}"], r"^rollout\.tools=\{\}: a mapping, expected a list, written as \[a, b\]$"),
        (["loss.params=[1]"], r"^loss\.params must be a mapping, written as \{name: value\}$"),
        (["loss.correction_bounds.max_weight=0.5"], r"correction_bounds\.max_weight=0\.5 must be at least 1"),
        (["loss.correction=icepop", "loss.correction_bounds.min_weight=2"], r"min_weight=2\.0 must be from 0 to 1"),
        (["loss.correction_bounds.min_weight=0.5"], r"is not a bound of .*token_mis, which has max_weight$"),
        (["loss.correction=none", "loss.correction_bounds.max_weight=2"], r"correction=none, which has none$"),
        (["loss.kl_coef=-0.1"], r"loss\.kl_coef=-0\.1 must be a finite number, 0 or more"),
        (["mismatch.max_kl=0"], r"mismatch\.max_kl=0\.0 must be above 0"),
        (["mismatch.max_kl=.nan"], r"mismatch\.max_kl=nan must be above 0"),
        (["hosts.num=2"], r"hosts\.num=2 has no effect with hosts\.coordinator=''"),
        (["hosts.num=2"], r"set it to the ADDRESS:PORT of host 0, or set hosts\.coordinator=auto without hosts\.num"),
        (["hosts.num=2", "hosts.coordinator=auto"], r"or set hosts\.coordinator=auto without hosts\.num"),
        (["hosts.num=2", "hosts.coordinator=somewhere"], r"hosts\.coordinator=somewhere is not ADDRESS:PORT"),
        (["hosts.coordinator=10.0.0.1:99999"], r"hosts\.coordinator=10\.0\.0\.1:99999 is not ADDRESS:PORT"),
        (["hosts.coordinator=http://a:8476"], r"hosts\.coordinator=http://a:8476 is not ADDRESS:PORT"),
        (["hosts.coordinator=fd00::1:8476"], r"is not ADDRESS:PORT, for example 10\.0\.0\.1:8476 or \[fd00::1\]:8476"),
        (["hosts.num=2", "hosts.coordinator=a:1", "hosts.index=2"], r"index=2 must be from 0 to hosts\.num-1=1"),
        ([*SERVERS, "engine.gpus=[1,1]"], r"engine\.gpus=\[1, 1\] must be different GPU numbers"),
        ([*SERVERS, "engine.gpus=[-1]"], r"engine\.gpus=\[-1\] must be different GPU numbers, starting at 0"),
        ([*SERVERS, "engine.gpus=[1,2,3]", "engine.num_servers=2"], r"not split evenly over engine\.num_servers=2"),
        ([*SERVERS, "engine.gpus=[1]", "engine.urls=[http://a]"], r"without engine\.urls"),
        (["engine.gpus=[1]"], r"engine\.gpus=\[1\] is for servers that the run starts"),
        (["engine.weights_dir=/shared"], r"engine\.weights_dir=/shared has no effect without"),
    ],
)
def test_an_invalid_setting_is_rejected_with_its_key(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_config(None, *overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n\tnum_steps: 3", r"run\.yaml, line 2, column 1: invalid YAML: found character that cannot start"),
        ("seed: 1\nseed: 2", r"run\.yaml, line 2, column 1: invalid YAML: found duplicate key seed"),
        ("seed: \0", r"run\.yaml: invalid YAML: "),
        ("- seed", r"run\.yaml is a list, expected settings such as train: "),
        (
            "train: {num_step: 3}",
            r"run\.yaml, line 1: train\.num_step is not a setting \(did you mean train\.num_steps\?\)",
        ),
        ("train:\n  num_steps: many", r"run\.yaml, line 2: train\.num_steps: Value 'many'"),
        ("seed:\tmany", r"run\.yaml, line 1: seed: Value 'many'"),
        ("rollout: {tools: {}}", r"run\.yaml: a mapping, expected a list, written as \[a, b\]$"),
        ("engine: {urls: [[a]]}", r"run\.yaml, line 1: engine\.urls must be a list, written as \[a, b\]$"),
        ("loss: {name: '${oc.env:ABSENT}'}", r"^loss\.name: KeyError .*'ABSENT' not found\"$"),
        ("train.num_steps: 3", r"run\.yaml: train\.num_steps has dots, .*; write train: \{num_steps: …\}$"),
        ("sft: {num_steps: 1}\n", r"run\.yaml is for python -m paravt_jax\.sft: line 1: sft\.num_steps is not "),
    ],
)
def test_an_invalid_file_gives_a_one_line_error_with_its_line_number(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(text)
    for path in ("run.yaml", tmp_path / "run.yaml"):
        with pytest.raises(ValueError, match=message) as raised:
            load_config(path)
        assert "\n" not in str(raised.value)


def test_a_number_in_a_file_for_a_text_setting_is_rejected(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("seed: 3\nrun_dir: 20261128_1030\n")
    with pytest.raises(ValueError, match=r"own.yaml, line 2: run_dir is text, but YAML reads 202611281030; put it in"):
        load_config(file)
    file.write_text("seed: 3\nrun_dir: '20261128_1030'\n")
    assert load_config(file).run_dir == "20261128_1030"


NUMBERS = ("20261128_1030", "007", "1e3", "4.10", "12:30", "on")  # as YAML reads them
SYNTAX = ("runs/run #2", "runs/a: b", "[a]/b", "@a", "a:", "<think>\n", "a=b", "a # b", "- a", "a, b")


@pytest.mark.parametrize("text", [*NUMBERS, *SYNTAX, "'007'", '"a #b"', "${seed}"])
def test_a_text_setting_keeps_a_text_that_yaml_reads_differently(text):
    assert load_config(None, f"run_dir={text}", "seed=3").run_dir == text.strip("'\"").replace("${seed}", "3")


def test_a_path_setting_expands_a_tilde(tmp_path, monkeypatch):
    """Shells expand it in `--flag ~/a`, but not in `data.video_root=~/a`."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (file := tmp_path / "own.yaml").write_text("run_dir: ~/runs/a\n")
    config = load_config(file, "data.video_root=~/videos", "engine.kind=sglang", "engine.urls=[~/servers.txt]")
    assert (config.run_dir, config.data.video_root) == (f"{tmp_path}/runs/a", f"{tmp_path}/videos")
    assert config.engine.urls == [f"{tmp_path}/servers.txt"]


def test_suggestions_are_settings_of_the_command():
    with pytest.raises(ValueError, match=r"num_steps is not a setting \(did you mean sft\.num_steps\?\)"):
        load_config(CONFIGS / "sft_8b.yaml", "num_steps=3", schema=SftConfig)


def test_all_problems_are_reported_at_once():
    with pytest.raises(ValueError, match=r"num_step is not .*; learning_rate is not .*optim\.learning_rate"):
        load_config(None, "train.num_step=3", "learning_rate=1")
    with pytest.raises(ValueError, match=r"mesh\.data x mesh\.fsdp = 2; .*rollout\.temperature"):
        load_config(None, "mesh.data=2", "rollout.temperature=0")


def test_another_loss_starts_from_its_own_default_parameters(tmp_path):
    (tmp_path / "run.yaml").write_text("loss: {name: para_grpo, params: {clip_low: 0.1}}")
    assert load_config(tmp_path / "run.yaml").loss.params == {"clip_low": 0.1, "clip_high": 0.2, "dual_clip": 0.0}
    same = load_config(tmp_path / "run.yaml", "loss.params.clip_high=0.3", "loss.name=para_grpo")
    assert same.loss.params == {"clip_low": 0.1, "clip_high": 0.3, "dual_clip": 0.0}
    other = load_config(tmp_path / "run.yaml", "loss.params.clip_high=0.3", "loss.name=dapo")
    assert other.loss.params == {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 0.0}
    assert load_config(None, "loss.name=cispo").loss.params == {"max_ratio": 5.0}


def test_a_loss_of_your_own_can_have_any_parameters():
    assert load_config(None, "loss.name=mine.py:loss", "loss.params.alpha=2").loss.params == {"alpha": 2.0}


def test_environment_variables_are_used_and_not_recorded(monkeypatch, tmp_path):
    monkeypatch.setenv("WHERE", "/secret/place")
    (tmp_path / "run.yaml").write_text("data: {train: '${oc.env:WHERE}/rows.jsonl'}\nrun_dir: runs/${seed}\n")
    urls = "engine.urls=['http://${oc.env:WHERE}']"
    with pytest.raises(ValueError, match=r"^rollout\.prompts_file=runs/0/prompts\.yaml: No such file"):
        load_config(tmp_path / "run.yaml", "rollout.prompts_file=${run_dir}/prompts.yaml")
    config = load_config(tmp_path / "run.yaml", "model.path=${oc.env:WHERE}", "engine.kind=sglang", urls)
    used = (config.model.path, config.data.train, config.run_dir)
    assert used == ("/secret/place", "/secret/place/rows.jsonl", "runs/0")
    record = to_record(config)
    assert record["model"]["path"] == "${oc.env:WHERE}" and record["engine"]["urls"] == ["http://${oc.env:WHERE}"]
    assert "secret" not in json.dumps(record)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.kind=sglang", "engine.urls=['http://me:hunter2@host:1']"],
        ["reward.oe_mode=llm", "judge.url=https://hunter2@host/v1", "judge.model=m"],
        ["reward.oe_mode=llm", "judge.url=ftp://hunter2@host/v1", "judge.model=m"],
    ],
)
def test_a_password_in_a_url_is_rejected_and_not_printed(overrides):
    with pytest.raises(ValueError, match="contains a user name or password") as refused:
        load_config(None, *overrides)
    assert "hunter2" not in str(refused.value)


def test_a_cold_start_ignores_checks_that_only_sampling_needs():
    config = load_config(CONFIGS / "sft_8b.yaml", "rollout.max_context_tokens=1024", schema=SftConfig)
    assert (config.rollout.max_context_tokens, config.rollout.max_new_tokens) == (1024, 2048)
    recipe = recipe_of(config).rollout  # valid for later sampling
    assert (recipe.max_context_tokens, recipe.max_new_tokens) == (1024, 1024)
    with pytest.raises(ValueError, match="leaves no room"):
        load_config(None, "data.validation=a", "rollout.max_context_tokens=1024", schema=EvalConfig)


OWN_TOOL = """
from rollout.toolbox import Tool
from rollout.tools import ToolSpec, make_schema

class Look(Tool):
    spec = ToolSpec(make_schema("look", "Looks."), usage="look", effect="you see more")
"""


def test_settings_are_checked_against_the_edited_tool(tmp_path):
    own = tmp_path / "own.py"
    for name in ("look", "peek"):
        own.write_text(OWN_TOOL.replace('"look"', f'"{name}"'))
        system = f"rollout.prompts.system=You can {name}."
        load_config(None, f"rollout.tools=[{own}:Look]", system, "rollout.prompts.system_has_tools=true")
