"""Where things lie in a run and its checkpoints: the names, and whether a directory is one. Loads nothing."""

from pathlib import Path
from typing import Any

from model_port.json_files import Section, read_object

PARAMS_DIR, HF_DIR, INFO_FILE = "params", "hf", "paravt_jax.json"
CHECKPOINTS_DIR, OPTIMIZER_DIR, RECORD_FILE = (
    "checkpoints",
    "optimizer",
    "state.json",
)  # of a run
RESULTS_FILE = "eval.json"  # in the run_dir of an evaluation
ADAPTER_CONFIG_FILE, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
BASE_KEY = "base_model_name_or_path"


def is_checkpoint(path: Path) -> bool:
    """A converted checkpoint, or one of a run."""
    return (path / PARAMS_DIR).is_dir()


def is_adapter(path: Path) -> bool:
    """An adapter in PEFT's format, or a checkpoint of a run that trains one."""
    return (path / ADAPTER_CONFIG_FILE).is_file()


def base_of(adapter: Path) -> str:
    """The directory or hub id of the model that an adapter belongs to."""
    config = Section(str(adapter / ADAPTER_CONFIG_FILE), read_adapter_config(adapter))
    base = config.text(BASE_KEY, "")
    if not base or "\0" in base:
        raise ValueError(f"{config.source} does not say {BASE_KEY}, the model that it belongs to")
    return base


def read_adapter_config(adapter: Path) -> dict[str, Any]:
    return read_object(adapter / ADAPTER_CONFIG_FILE)


def hf_files_of(path: Path) -> Path:
    """Config, tokenizer and processor: in a checkpoint, with the base of an adapter, or beside weights themselves."""
    if is_checkpoint(path) or (is_adapter(path) and (path / HF_DIR).is_dir()):
        return path / HF_DIR
    return hf_files_of(Path(base_of(path))) if is_adapter(path) else path
