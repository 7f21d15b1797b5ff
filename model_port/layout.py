"""Names of files and directories in a run and its checkpoints, and checks of a directory's kind. Cheap to import."""

import json
from pathlib import Path
from typing import Any

from model_port.json_files import Section, read_object

PARAMS_DIR, HF_DIR, INFO_FILE = "params", "hf", "paravt_jax.json"
CHECKPOINTS_DIR, OPTIMIZER_DIR, RECORD_FILE = ("checkpoints", "optimizer", "state.json")  # in a run
RESULTS_FILE = "eval.json"  # in the run_dir of an evaluation
ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = "base_model_name_or_path"


def absolute_path(path: str | Path) -> Path:
    """Makes a path absolute and removes "..", which tensorstore rejects. Links are only resolved if there is a ".."."""
    path = Path(path).absolute()
    return path.resolve() if ".." in path.parts else path


def is_checkpoint(path: Path) -> bool:
    """Returns whether the path is a converted checkpoint or a run's checkpoint."""
    return (path / PARAMS_DIR).is_dir()


def newest_checkpoint(run: Path) -> Path | None:
    """Returns a run's checkpoint with the highest number, whether or not it is complete."""
    steps = [int(step.name) for step in (run / CHECKPOINTS_DIR).glob("*") if step.name.isdecimal()]
    return run / CHECKPOINTS_DIR / str(max(steps)) if steps else None


def is_adapter(path: Path) -> bool:
    """Returns whether the path is an adapter in PEFT's format, or a checkpoint of a run that trains an adapter."""
    return (path / ADAPTER_CONFIG_FILE).is_file()


def check_not_missing(path: Path) -> None:
    """Raises if `path` is of a run's checkpoint that does not exist, and names one that does."""
    run = path.parent.parent
    if path.parent.name == CHECKPOINTS_DIR and not path.exists() and (newest := newest_checkpoint(run)):
        raise ValueError(f"{path} does not exist; the newest checkpoint of {run} is {newest}")


def check_has_config(directory: Path) -> None:
    newest = newest_checkpoint(directory)
    if newest is not None and (is_checkpoint(newest) or is_adapter(newest)):
        raise ValueError(f"{directory} is a run and not a model; give one of its checkpoints, such as {newest}")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json, so it is not a Hugging Face model directory")


def base_of(adapter: Path) -> str:
    """Returns the directory or hub id of an adapter's base model."""
    file = adapter / ADAPTER_CONFIG_FILE
    config = Section(str(file), read_object(file))
    base = config.text(BASE_KEY, "")
    if not base or "\0" in base:
        raise ValueError(f"{config.source} has no {BASE_KEY}, the base model")
    return base


def hf_files_of(path: Path) -> Path:
    """Returns the directory of config, tokenizer and processor; for an adapter without one, its base model's."""
    if is_checkpoint(path) or (is_adapter(path) and (path / HF_DIR).is_dir()):
        return path / HF_DIR
    return hf_files_of(Path(base_of(path))) if is_adapter(path) else path


def read_results(run: Path) -> list[dict[str, Any]]:
    """Reads the results of a finished evaluation."""
    file = run / RESULTS_FILE
    try:
        cells = json.loads(file.read_bytes())["cells"]
        if not all(cell["model"]["path"] for cell in cells):
            raise ValueError("a cell has no model")
        return cells
    except FileNotFoundError:
        raise ValueError(f"{run} has no {RESULTS_FILE}; give the run_dir of a finished evaluation") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{file} has no evaluation results ({problem}); run paravt_jax.eval again") from None
