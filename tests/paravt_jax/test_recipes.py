"""The configs of the package are found by name from any directory, listed and copied."""

import resource
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from paravt_jax.config import SftConfig, load_config
from paravt_jax.config.recipes import main
from paravt_jax.config.shipped import config_file, recipes
from paravt_jax.evaluation.batch import jobs_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("paravt_jax", "model_port", "rollout")
REPRODUCE = ROOT / "configs" / "reproduce"


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_config_of_the_repository_is_listed_with_its_title(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paravt configs"])
    main()
    lines = capsys.readouterr().out.splitlines()
    files = {str(file.relative_to(ROOT / "configs").with_suffix("")) for file in (ROOT / "configs").rglob("*.yaml")}
    assert {line.split()[0] for line in lines} == files == {*recipes()}
    assert all(len(line.split()) > 4 and "#" not in line and line.endswith(".") for line in lines)


@pytest.mark.parametrize("name", ["sft_8b", "sft_8b.yaml", "configs/sft_8b.yaml"])
def test_a_config_is_found_by_name_from_any_directory(name, elsewhere):
    files = (name, ROOT / "configs" / "sft_8b.yaml")
    found, expected = (load_config(file, "data.train=x", schema=SftConfig) for file in files)
    assert found.optim == expected.optim


@pytest.mark.parametrize("name", ["reproduce", "configs/reproduce"])
def test_a_batch_finds_a_directory_of_configs_by_name_unless_there_is_one(name, elsewhere):
    arguments = (["longvideobench"], elsewhere, None, [])
    jobs = jobs_of(Path(name), *arguments)
    names = sorted(path.stem for path in REPRODUCE.glob("*.yaml"))
    assert [Path(config.run_dir).parent.name for config in jobs.values()] == names
    (elsewhere / name).mkdir(parents=True)
    with pytest.raises(ValueError, match=f"{name} has no"):
        jobs_of(Path(name), *arguments)


def test_a_file_comes_before_a_config_of_the_same_name(elsewhere):
    (elsewhere / "sft_8b").write_text("seed: 41\n")
    assert config_file("sft_8b") == Path("sft_8b")


def test_a_directory_does_not_hide_the_config_of_the_same_name(elsewhere):
    (elsewhere / "smoke_cpu").mkdir()  # for example a run's
    assert config_file("smoke_cpu") == recipes()["smoke_cpu"]


@pytest.mark.parametrize(("name", "hint"), [("paragrpo_8", "did you mean paragrpo_8b"), ("xyz", "`paravt configs`")])
def test_an_unknown_name_is_a_one_line_error(name, hint, elsewhere):
    with pytest.raises(FileNotFoundError, match=hint):
        load_config(name)


def test_a_config_of_another_command_is_one_error(elsewhere):
    with pytest.raises(ValueError, match=r"sft_8b.yaml is for python -m paravt_jax.sft: line \d+: ") as raised:
        load_config("sft_8b")
    assert str(raised.value).count("sft_8b.yaml") == 1


def test_a_copy_never_replaces_a_file(elsewhere, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paravt configs", "contrast/qwen25vl_7b_sft", "--to", "own"])
    main()
    copy = elsewhere / "own" / "qwen25vl_7b_sft.yaml"
    assert copy.read_bytes() == (ROOT / "configs/contrast/qwen25vl_7b_sft.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"qwen25vl_7b_sft.yaml exists"):
        main()
    monkeypatch.setattr("sys.argv", ["paravt configs", "smoke_cpu", "--to", str(copy)])
    with pytest.raises(ValueError, match=r"^--to .*/own/qwen25vl_7b_sft.yaml is not a directory$"):
        main()


def test_a_full_disk_leaves_no_empty_copy(elsewhere, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paravt configs", "smoke_cpu"])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: .*smoke_cpu\.yaml"):
            main()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(elsewhere.iterdir())


@pytest.mark.slow
def test_the_wheel_has_the_configs_and_every_file_of_the_packages(tmp_path):
    """Builds the wheel without pip's build isolation, which needs the network and most of the time."""
    unused = shutil.ignore_patterns(".*", "__pycache__", "tests", "docs", "runs")
    source = shutil.copytree(ROOT, tmp_path / "source", ignore=unused, symlinks=True)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", build], check=True, cwd=source, capture_output=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if not name.split("/")[0].endswith(".dist-info")}
    files = (file for package in PACKAGES for file in (ROOT / package).rglob("*") if "__pycache__" not in file.parts)
    packaged = {str(file.relative_to(ROOT)) for file in files if file.is_file()}
    assert names == packaged | {f"paravt_jax/configs/{name}.yaml" for name in recipes()}
