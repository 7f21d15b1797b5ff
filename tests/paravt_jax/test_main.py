"""`paravt NAME` and `python -m paravt_jax NAME` run every command."""

import re
import subprocess
import sys
import tomllib
from inspect import signature
from pathlib import Path

import pytest

import paravt_jax
from paravt_jax.__main__ import COMMANDS, main, overview, run
from paravt_jax.config import Config

ROOT = Path(__file__).parents[2]
INTERNAL = {  # modules that only our own processes start
    "paravt_jax",
    "paravt_jax.check.stages",
    "rollout.check",  # runs as `gate`
    "rollout.supervisor",
    "rollout.templates",
    "rollout.video.worker",
}


def test_every_command_is_listed():
    files = [path for name in ("paravt_jax", "model_port", "rollout") for path in (ROOT / name).rglob("*.py")]
    runs = [path.relative_to(ROOT) for path in files if '\nif __name__ == "__main__":\n' in path.read_text()]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in runs}
    assert modules - INTERNAL == {module for module, _ in COMMANDS.values()}
    assert all(f"  {name} " in overview() and clause in overview() for name, (_, clause) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["--help"], ["help"]])
def test_without_a_command_the_commands_are_listed(arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paravt", *arguments])
    main()
    assert capsys.readouterr().out == overview() + "\n"


def test_the_version_is_the_packages(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paravt", "--version"])
    main()
    assert capsys.readouterr().out == f"paravt_jax {paravt_jax.__version__}\n"


def test_python_calls_train_and_sft_with_the_settings_of_a_file():
    assert {"train", "sft"} <= set(dir(paravt_jax))  # as a REPL completes them
    with pytest.raises(TypeError, match=r"train needs load_config\(FILE\) of paravt_jax\.config, got 'smoke_cpu'"):
        paravt_jax.train("smoke_cpu")
    with pytest.raises(TypeError, match=r"sft needs load_config\(FILE, schema=SftConfig\) of .*, got Config"):
        paravt_jax.sft(Config())


def test_a_notebook_shows_the_arguments_of_train_and_sft():
    assert [*signature(paravt_jax.train).parameters] == ["config", "replay", "allow_changes", "take_over"]
    assert [*signature(paravt_jax.sft).parameters] == ["config", "allow_changes"]


def test_python_names_the_run_to_replay_as_text_or_path(tmp_path):
    for run_dir in (tmp_path, str(tmp_path)):
        with pytest.raises(ValueError, match=r"is not a run, because it has no metrics\.jsonl"):
            paravt_jax.train(Config(run_dir=str(tmp_path / "replay")), replay=run_dir)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_short_name(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paravt", name, "--help"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: paravt {name} [-h]")


@pytest.mark.slow
def test_no_package_imports_a_command_which_python_m_would_warn_about():
    modules = [module for module, _ in COMMANDS.values()]
    packages = {module.rpartition(".")[0] for module in modules}
    code = f"import sys, {', '.join(packages)}; print(*[name for name in {modules} if name in sys.modules])"
    imported = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    packages_with_main = {module for module in modules if (ROOT / module.replace(".", "/") / "__main__.py").exists()}
    assert {*imported} <= packages_with_main


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "output"),
    [
        (["train", "--show", "run_dir=elsewhere", "seed=41"], 0, r"(?s).*\nseed: 41  .*"),
        (["train", "--show", "seed=many"], 1, r"error: seed=many: [^\n]*\n"),
        (["trian"], 1, r"error: trian is not a command \(did you mean train\?\)\n"),
    ],
)
def test_a_command_has_its_arguments_and_an_error_is_one_line_with_exit_code_1(arguments, code, output):
    command = [sys.executable, "-m", "paravt_jax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and re.fullmatch(output, done.stderr if code else done.stdout)


def test_an_unknown_command_without_a_similar_name_points_to_the_help(monkeypatch):
    monkeypatch.setattr("sys.argv", ["paravt", "zebra"])
    with pytest.raises(ValueError, match=r"zebra is not a command \(--help lists all\)"):
        main()


def test_the_installed_script_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"paravt": f"{run.__module__}:{run.__name__}"}
