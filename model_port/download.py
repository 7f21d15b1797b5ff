"""Finds a model by its directory, bucket address or hub id, and downloads it if needed."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from model_port.bucket import downloaded, is_address
from model_port.hf_files import HUB_ID, SIDE_FILES
from model_port.hub import reason_of, transferring
from model_port.layout import (
    ADAPTER_CONFIG_FILE,
    OPTIMIZER_DIR,
    check_has_config,
    check_not_missing,
    is_adapter,
    is_checkpoint,
)
from model_port.output_dir import check_local
from model_port.safetensors_io import INDEX_FILE

WEIGHTS = ("*.safetensors", INDEX_FILE)


def local_directory(path: str | Path) -> Path:
    """Returns a model's local directory. Downloads a model at gs://…, without the optimizer's state."""
    if is_address(path):
        return downloaded(path, lambda name: not name.startswith(f"{OPTIMIZER_DIR}/"))
    check_not_missing(Path(path))
    return Path(path)


def source_directory(src: str | Path, given_as: str = "--src DIR", *, weights: bool = True) -> Path:
    """Returns a model's local directory. Downloads a hub id `ORG/NAME` or a bucket's model first.

    `weights=False` skips the hub model's weights. `given_as` tells the user in errors how to give a directory instead.
    """
    if Path(src).is_dir() or is_address(src):
        directory = local_directory(src)
        if not (is_checkpoint(directory) or is_adapter(directory)):
            check_has_config(directory)
        return directory
    check_local(src)
    check_not_missing(Path(src))
    if Path(src).exists():
        raise ValueError(f"{src} is a file; give the directory of the model")
    if not HUB_ID.fullmatch(str(src)):
        raise ValueError(f"{src} is neither a directory nor a hub id like Qwen/Qwen3-VL-8B-Instruct")
    try:
        with transferring(f"downloading {src}"):
            patterns = [*(WEIGHTS if weights else ()), ADAPTER_CONFIG_FILE, *SIDE_FILES]
            return Path(snapshot_download(str(src), allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as problem:
        raise RuntimeError(
            f"{src} is not a directory and could not be downloaded from the hub ({reason_of(problem)}); "
            f"check the name and the network, or run `hf download {src} --local-dir DIR` on a machine that is online, "
            f"copy DIR here and give {given_as}"
        ) from problem
