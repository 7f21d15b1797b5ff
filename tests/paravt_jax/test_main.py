"""`paravt NAME` and `python -m paravt_jax NAME` are the commands that there are."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from paravt_jax.__main__ import COMMANDS, main, overview, run

ROOT = Path(__file__).parents[2]
INTERNAL = {  # started by our own processes, with nobody to read their help
    "paravt_jax",
    "paravt_jax.sampling.score",
    "rollout.staging",
    "rollout.supervisor",
    "rollout.templates",
    "rollout.video.worker",
}


def paravt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "paravt_jax", *arguments], capture_output=True, text=True, timeout=60)


def test_every_command_is_listed():
    files = [path for name in ("paravt_jax", "model_port", "rollout") for path in (ROOT / name).rglob("*.py")]
    runs = [path.relative_to(ROOT) for path in files if '\nif __name__ == "__main__":\n' in path.read_text()]
    modules = {".".join(path.with_suffix("").parts).removesuffix(".__main__") for path in runs}
    assert modules - INTERNAL == {module for module, _ in COMMANDS.values()}
    assert all(f"  {name} " in overview() and clause in overview() for name, (_, clause) in COMMANDS.items())


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_there_is_the_list(arguments):
    done = paravt(*arguments)
    assert (done.returncode, done.stdout, done.stderr) == (0, overview() + "\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_short_name(name, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paravt", name, "--help"])
    with pytest.raises(SystemExit) as raised:
        main()
    assert raised.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: paravt {name} [-h]")


@pytest.mark.slow
def test_a_command_gets_its_arguments():
    assert "\nseed: 41  " in "\n" + paravt("train", "--show", "run_dir=elsewhere", "seed=41").stdout
    done = paravt("train", "--show", "seed=many")
    assert done.returncode == 1 and done.stderr.startswith("error: seed=many: ") and done.stderr.count("\n") == 1


def test_a_name_that_is_none_is_told_with_the_one_that_was_meant():
    assert paravt("trian").stderr == "error: trian is no command (did you mean train?)\n"
    done = paravt("zebra", "--debug")
    assert done.returncode == 1 and done.stderr.endswith("error: zebra is no command (--help lists all)\n")


def test_the_script_that_pip_installs_is_this_command():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"paravt": f"{run.__module__}:{run.__name__}"}
