"""The packages install completely, and scripts/setup.sh requests the right requirements."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import paravt_jax

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("paravt_jax", "model_port", "rollout")
LOCKS = ROOT / "requirements"
UV = "requirements/uv.txt"
DEV_REQUESTS = [UV, "requirements/dev-data.txt", "torch==2.13.0", "."]  # last argument of each call of pip and uv
PYTHONS = ("3.11", "3.12", "3.13")
FRAGILE = {"jax", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "av", "transformers"}


def requirements(extra: str | None = None) -> list[Requirement]:
    """Returns the requirements of the package or of an extra, which may include other extras as paravt_jax[NAME]."""
    project = PYPROJECT["project"]
    lines = project["optional-dependencies"][extra] if extra else project["dependencies"]
    parsed = [Requirement(line) for line in lines]
    own = [requirement for requirement in parsed if requirement.name != project["name"]]
    return own + [
        each
        for requirement in parsed
        if requirement.name == project["name"]
        for name in requirement.extras
        for each in requirements(name)
    ]


def test_every_code_folder_is_an_installed_package():
    found = PYPROJECT["tool"]["setuptools"]["packages"]["find"]
    assert found == {"include": [f"{name}*" for name in PACKAGES]}
    folders = {path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    sidecar = {"sglang_cpu", "sglang_plugin"}  # package data
    code = {folder for folder in folders if sidecar.isdisjoint(folder.parts)}
    assert {folder for folder in code if not (folder / "__init__.py").is_file()} == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_installed_packages_include_their_types(package):
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][package]


def test_only_the_dev_extra_requires_torch():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {extra for extra in [None, *extras] if "torch" in {one.name for one in requirements(extra)}} == {"dev"}


def test_fragile_dependencies_have_upper_bounds():
    bounded = {one.name for one in requirements() if any(bound.operator == "<" for bound in one.specifier)}
    assert bounded >= FRAGILE


@pytest.mark.parametrize(
    ("extra", "of_jax"), [("cuda12", "cuda12"), ("tpu", "tpu"), ("aot-gpu", "cuda12-local"), ("aot-tpu", "tpu")]
)
def test_all_accelerators_and_compilers_use_the_same_jax(extra, of_jax):
    (base,) = (one.specifier for one in requirements() if one.name == "jax")
    (ours,) = requirements(extra)
    assert ours.name == "jax" and ours.extras == {of_jax} and ours.specifier == base


def locked(name: str, python: str = "3.11") -> dict[str, Version]:
    """Returns the versions that a lock pins for a Python version, each of which must have hashes."""
    found = {}
    for block in re.split(r"\n(?=\S)", (LOCKS / f"{name}.txt").read_text().strip()):
        assert "--hash=sha256:" in block, block
        one = Requirement(block.partition("\\")[0])
        if one.marker is None or one.marker.evaluate({"python_full_version": f"{python}.5", "python_version": python}):
            (pin,) = one.specifier
            assert pin.operator == "==" and canonicalize_name(one.name) not in found
            found[canonicalize_name(one.name)] = Version(pin.version)
    return found


@pytest.mark.parametrize("python", PYTHONS)
@pytest.mark.parametrize("kind", ["cpu", "cuda12", "tpu", "dev"])
def test_every_requirement_is_in_the_lock_within_its_bounds(kind, python):
    releases = locked(kind, python)
    wanted = [*requirements(), *([] if kind == "cpu" else requirements(kind))]
    unlocked = {one.name for one in wanted if releases.get(canonicalize_name(one.name), "none") not in one.specifier}
    assert unlocked == ({"torch"} if kind == "dev" else set())
    assert "setuptools" in releases  # builds the package itself in setup.sh


@pytest.mark.parametrize("python", PYTHONS)
def test_runtime_locks_have_the_tested_versions(python):
    tested = locked("dev", python)
    for kind in ("cpu", "cuda12", "tpu"):
        assert {name: at for name, at in locked(kind, python).items() if tested.get(name, at) != at} == {}


def test_torch_and_sglang_are_pinned_in_one_version():
    (torch,) = (str(one) for one in requirements("dev") if one.name == "torch")
    (sglang,) = map(str, requirements("sglang"))
    lines = (ROOT / "scripts/setup_sglang.sh").read_text().splitlines()
    assert torch in DEV_REQUESTS and f"torch={torch}" in lines and f"sglang={sglang}" in lines
    for variant in ("cpu", "cuda"):
        assert Version(sglang.partition("==")[2]) == locked(f"sglang-{variant}")["sglang"]
        assert "torch" not in locked(f"sglang-{variant}")


def test_locks_contain_no_urls_or_options():
    for file in LOCKS.iterdir():
        assert re.findall(r"://|--(?!hash=)\S+", file.read_text()) == [], file.name


def test_a_clone_on_pythonpath_is_imported_without_being_installed(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patched:
        patched.setattr(metadata, "version", missing)
        importlib.reload(paravt_jax)
        with pytest.raises(metadata.PackageNotFoundError):
            paravt_jax.__version__  # noqa: B018
    assert importlib.reload(paravt_jax).__version__ == PYPROJECT["project"]["version"]


@pytest.fixture
def setup_sh(tmp_path):
    """Runs scripts/setup.sh in a clone with a fake pip and uv. Returns the last argument of each call to them."""
    clone = tmp_path / "clone"
    (clone / "scripts").mkdir(parents=True)
    for name in ("pyproject.toml", "scripts/setup.sh", "scripts/install_locked.sh"):
        shutil.copy(ROOT / name, clone / name)
    shutil.copytree(LOCKS, clone / "requirements")
    venv.create(clone / ".venv", symlinks=True)
    (tmp_path / "pip.py").write_text("import sys; print('asked for', sys.argv[-1])")
    (tmp_path / "python3").symlink_to("/bin/false")
    uv = clone / ".venv/bin/uv"
    uv.write_text('#!/bin/sh\nfor last; do :; done; sleep ${UV_S:-0}; echo asked for "$last"; exit ${UV_FAILS:-0}\n')
    uv.chmod(0o755)

    def run(kind: str, place: Path = clone, **variables: str) -> list[str]:
        env = {name: value for name, value in os.environ.items() if name != "PYTHON"}
        env |= {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{env['PATH']}", "PWD": str(place)} | variables
        command = ["bash", "scripts/setup.sh", kind]
        done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [line.removeprefix("asked for ") for line in done.stdout.splitlines() if line.startswith("asked for ")]

    return run


@pytest.mark.parametrize("kind", ["cuda12", "tpu"])
def test_a_runtime_environment_has_no_test_dependencies(setup_sh, kind):
    assert setup_sh("cpu") == [UV, "requirements/cpu.txt", "."]
    assert setup_sh(kind) == [UV, f"requirements/{kind}.txt", "."]


def test_the_dev_environment_is_also_a_runtime_environment(setup_sh):
    assert setup_sh("cpu") == [UV, "requirements/cpu.txt", "."] and setup_sh("cpu") == []
    assert setup_sh("dev") == DEV_REQUESTS
    assert setup_sh("cpu") == setup_sh("dev") == []


def test_a_second_setup_waits_for_the_first_and_has_nothing_to_do(setup_sh):
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(setup_sh, "cpu", UV_S="1") for _ in range(2)]
    assert sorted(run.result() for run in both) == [[], [UV, "requirements/cpu.txt", "."]]


def test_a_clone_that_cannot_be_locked_is_set_up(setup_sh, tmp_path):
    (tmp_path / "flock").write_text("#!/bin/sh\nexit 66\n")  # as on some network file systems
    (tmp_path / "flock").chmod(0o755)
    assert setup_sh("cpu") == [UV, "requirements/cpu.txt", "."]


def test_pip_is_the_fallback_if_uv_fails(setup_sh, monkeypatch):
    monkeypatch.setenv("UV_FAILS", "1")
    assert setup_sh("cpu") == [UV, "requirements/cpu.txt", "requirements/cpu.txt", "."]


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements/dev.txt"])
def test_changed_requirements_reinstall_the_same_kind(name, setup_sh, tmp_path):
    setup_sh("dev")
    with (tmp_path / "clone" / name).open("a") as file:
        file.write("# changed\n")
    assert setup_sh("cpu") == DEV_REQUESTS


@pytest.mark.parametrize(("first", "then"), [("cuda12", "dev"), ("dev", "cuda12"), ("tpu", "cuda12")])
def test_conflicting_kinds_never_share_an_environment(setup_sh, first, then):
    setup_sh(first)
    with pytest.raises(RuntimeError, match=f"made for {first}, and {then} needs a separate one.*rm -rf .venv"):
        setup_sh(then)
    assert setup_sh(first) == setup_sh("cpu") == []


def test_a_symlinked_clone_keeps_its_environment(setup_sh, tmp_path):
    (tmp_path / "link").symlink_to("clone")
    assert setup_sh("cpu", tmp_path / "link") == [UV, "requirements/cpu.txt", "."]
    assert setup_sh("cpu", tmp_path / "link") == setup_sh("cpu") == []


def test_setup_never_leaves_the_clone(setup_sh, tmp_path):
    (tmp_path / "home/scripts").mkdir(parents=True)
    assert setup_sh("cpu", CDPATH=str(tmp_path / "home")) == [UV, "requirements/cpu.txt", "."]


def test_an_environment_that_was_interrupted_before_pip_is_rebuilt(setup_sh, tmp_path):
    program = tmp_path / "program"
    makes = '[ "$2" != venv ] || { echo "makes $3" >&2; exit 3; }'
    program.write_text(f'#!/bin/sh\n{makes}\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"^makes .venv$"):
        setup_sh("cpu", PYTHONPATH="", PYTHON=str(program))
    assert not (tmp_path / "clone/.venv").exists()


def test_an_interrupted_installation_is_repeated_with_the_files_from_before(setup_sh, tmp_path):
    setup_sh("cpu")
    pip, lock = tmp_path / "pip.py", tmp_path / "clone/requirements/cpu.txt"
    working, locked_before = pip.read_text(), lock.read_text()
    pip.write_text("raise SystemExit(1)")
    lock.write_text(f"{locked_before}# changed\n")
    with pytest.raises(RuntimeError):
        setup_sh("cpu")
    pip.write_text(working)
    lock.write_text(locked_before)
    assert setup_sh("cpu") == [UV, "requirements/cpu.txt", "."]


def test_the_sidecar_keeps_its_python_when_another_is_first_in_path(tmp_path):
    clone, program = tmp_path / "clone", tmp_path / "program"
    shutil.copytree(LOCKS, clone / "requirements")
    (clone / "scripts").mkdir()
    for name in ("setup_sglang.sh", "install_locked.sh"):
        shutil.copy(ROOT / "scripts" / name, clone / "scripts")
    (tmp_path / "pip.py").touch()
    makes = f'{sys.executable} -m venv --without-pip "$3" && ln -s /bin/true "$3/bin/uv"'
    program.write_text(f'#!/bin/sh\nif [ "$2" = venv ]; then {makes}; exit; fi\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    (tmp_path / "python3").symlink_to("/bin/false")
    env = os.environ | {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for python, says in ((program, "installing"), ("", "is up to date")):
        command, env["PYTHON"] = ["bash", "scripts/setup_sglang.sh"], str(python)
        done = subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and says in done.stdout, done.stderr


def test_the_quickstart_exports_the_newest_intact_checkpoint(tmp_path):
    clone, run = tmp_path / "a clone", tmp_path / "a clone/runs/my run"
    prompt = 'if [ "$1" = - ]; then printf "video\\nquestion\\nanswer\\n"; fi'
    python = f'#!/bin/sh\necho "$*" >> calls\n{prompt}\n[ "$1" != -c ]\n'  # -c asks for torch
    quickstart = (ROOT / "scripts/quickstart.sh").read_text()
    fakes = {"scripts/quickstart.sh": quickstart, "scripts/setup.sh": "", ".venv/bin/python": python}
    for name, text in fakes.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text)
        (clone / name).chmod(0o755)
    for name in ("8", "10", "10.broken", "9.broken"):
        (run / "para_grpo/seed0/checkpoints" / name).mkdir(parents=True)
    command, env = ["bash", clone / "scripts/quickstart.sh"], os.environ | {"RUN": "runs/my run"}
    done = subprocess.run(command, cwd="/", env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (exported,) = (line for line in (clone / "calls").read_text().splitlines() if "model_port.export" in line)
    assert " --src runs/my run/para_grpo/seed0/checkpoints/10 --dst " in exported


def test_setup_takes_a_lock_that_works_on_nfs(tmp_path):
    """On NFS an exclusive lock needs a descriptor that is open for writing."""
    (tmp_path / "flock").write_text('#!/bin/sh\ngrep flags "/proc/self/fdinfo/$1"\nexit 1\n')
    (tmp_path / "flock").chmod(0o755)
    env = os.environ | {"PYTHON": sys.executable, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    script = ROOT / "scripts/setup_sglang.sh"
    done = subprocess.run(["bash", script], env=env, capture_output=True, text=True, timeout=60)
    assert int(done.stdout.split()[-1], 8) & os.O_RDWR, done.stderr


@pytest.mark.parametrize("name", ["gpu_check", "lock", "quickstart", "setup", "setup_sglang", "test"])
def test_the_help_of_a_script_has_its_usage(name):
    command = ["bash", ROOT / f"scripts/{name}.sh", "--help"]
    assert f"bash scripts/{name}.sh" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
