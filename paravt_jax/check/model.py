"""Makes the model to check, from a directory or random at a published size, with all layers or fewer."""

import json
from dataclasses import replace
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from model_port.config import FAMILIES, ModelConfig, config_to_hf, read_config
from model_port.export import export
from model_port.hf_files import CONFIG_FILE, SIDE_FILES, TOKENIZER_FILE, read_side_files, write_side_files
from model_port.layout import is_adapter, is_checkpoint
from model_port.output_dir import output_directory
from model_port.safetensors_io import SINGLE_FILE, safetensors_writer
from model_port.tiny import make_tiny
from model_port.weights import open_hf_tensors, rules
from paravt_jax.config import TINY
from paravt_jax.plan.plan import model_config

MIN_PIXELS, MAX_PIXELS = 65_536, 16_777_216  # bounds for images in the published files


def make_model(model: str, path: Path, layers: int) -> None:
    """Writes the Hugging Face directory `path`, or links it if all layers of a directory are used."""
    source = Path(model)
    if source.is_dir() and (is_checkpoint(source) or is_adapter(source)):
        source = path.with_name("whole") if layers else path
        export(model, source)
    if source == path:
        return
    if model == TINY:
        make_tiny(path, config=None if not layers else cut(model_config(TINY)[0], layers))
    elif not source.is_dir():
        make_random(model, path, layers)
    elif layers:
        copy_layers(source, path, layers)
    else:
        path.symlink_to(source.absolute())


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The config with fewer language layers; 0: all."""
    if not layers:
        return config
    if layers > config.text.num_layers:
        raise ValueError(f"--layers {layers} is more than the model's {config.text.num_layers}")
    try:
        return replace(config, text=replace(config.text, num_layers=layers))
    except ValueError as problem:  # too few layers
        raise ValueError(f"--layers {layers}: {problem}") from None


def make_random(model: str, path: Path, layers: int) -> None:
    """Makes a model of a published size with random weights; uses published tokenizer and template if cached."""
    config = cut(model_config(model)[0], layers)
    make_tiny(path, config=config, dtype="bfloat16", min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS)
    if (published := published_files(config, model)) is not None:
        write_side_files(_with_config(read_side_files(published), config, "bfloat16"), path)


def published_files(config: ModelConfig, model: str) -> Path | None:
    """The directory of a published model in the hub's cache; never uses the network."""
    size = model.rpartition("-")[2].upper()
    repo = f"Qwen/{FAMILIES[config.family].title.replace(' ', '-')}-{size}-Instruct"
    try:
        path = Path(snapshot_download(repo, local_files_only=True, allow_patterns=[*SIDE_FILES]))
    except LocalEntryNotFoundError:
        return None
    return path if (path / TOKENIZER_FILE).is_file() else None


def copy_layers(source: Path, path: Path, layers: int) -> None:
    """Copies the first layers, the vision tower and all other tensors."""
    whole = read_config(source)
    config = cut(whole, layers)
    with open_hf_tensors(source, whole) as tensors, output_directory(path, source=source) as directory:
        names = [name for rule in rules(config) for name in rule.hf_names]
        infos = {name: (tensors.infos[name].dtype, tensors.infos[name].shape) for name in names}
        with safetensors_writer(directory / SINGLE_FILE, infos) as write:
            for name in names:
                write(tensors.read(name))
        write_side_files(_with_config(read_side_files(source), config, str(infos[names[0]][0])), directory)


def _with_config(files: dict[str, bytes], config: ModelConfig, dtype: str) -> dict[str, bytes]:
    return files | {CONFIG_FILE: (json.dumps(config_to_hf(config, dtype), indent=2) + "\n").encode()}
