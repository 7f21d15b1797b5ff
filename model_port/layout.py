"""Where things lie in a checkpoint: the names, and whether a directory is one. Loads nothing."""

from pathlib import Path

PARAMS_DIR, HF_DIR, INFO_FILE = "params", "hf", "paravt_jax.json"


def is_checkpoint(path: Path) -> bool:
    """A converted checkpoint, or one of a run."""
    return (path / PARAMS_DIR).is_dir()


def hf_files_of(path: Path) -> Path:
    """Config, tokenizer and processor of a checkpoint; of a Hugging Face directory that is itself."""
    return path / HF_DIR if is_checkpoint(path) else path
