"""From the name of a model to everything that a run needs of it: tokenizer, pixels, files, parameters on the mesh."""

from dataclasses import dataclass, replace
from pathlib import Path

from jax.sharding import Mesh

import model_port
from model_port.convert import source_directory
from model_port.hf_files import read_side_files, with_pixel_bounds, write_side_files
from model_port.layers import Compute
from model_port.layout import HF_DIR, hf_files_of
from model_port.model import Qwen3VL
from model_port.output_dir import output_directory
from model_port.processing import VisionContract
from model_port.sharding import make_mesh
from model_port.tiny import make_tiny
from paravt_jax.config import TINY, Config, EvalConfig, SftConfig
from rollout.chat import Chat


@dataclass(frozen=True, eq=False)
class Policy:
    """The model that a run begins with; its parameters are read by `load`."""

    mesh: Mesh | None  # None: one device
    contract: VisionContract
    chat: Chat
    hf_files: Path  # config, tokenizer, processor and template, with this run's bounds of pixels
    source: Path  # a Hugging Face directory or a converted checkpoint
    compute: Compute

    def load(self) -> Qwen3VL:
        """With float32 masters, on the mesh."""
        model = model_port.load(self.source, "float32", self.mesh)
        model.compute = self.compute
        return model


def open_policy(config: Config | SftConfig | EvalConfig, run_dir: Path) -> Policy:
    source = _source(config.model.path, config.seed, run_dir)
    hf_dir = hf_files_of(source)
    contract = replace(
        VisionContract.from_hf(hf_dir), min_pixels=config.video.min_pixels, max_pixels=config.video.max_pixels
    )
    if contract.unit_px != config.rollout.token_px:
        raise ValueError(
            f"rollout.token_px={config.rollout.token_px}, but a token of {source} shows {contract.unit_px} px"
        )
    hf_files = run_dir / HF_DIR
    with output_directory(hf_files, force=True, replaceable=lambda path: path.is_dir()) as directory:
        files = with_pixel_bounds(read_side_files(hf_dir), contract.min_pixels, contract.max_pixels)
        write_side_files(files, directory)
    mesh = None
    if config.mesh.num_devices > 1:
        mesh = make_mesh(config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
    compute = Compute(config.model.dtype, config.model.attention, remat=config.model.remat)
    return Policy(mesh, contract, Chat.from_hf(hf_files), hf_files, source, compute)


def _source(path: str, seed: int, run_dir: Path) -> Path:
    if path != TINY:
        return source_directory(path, "model.path=DIR")
    made = run_dir / TINY
    if not made.is_dir():
        make_tiny(made, seed)
    return made
