"""Opens a model for a run: tokenizer, pixel budget, files, and parameters on the mesh."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import jax
from jax.sharding import Mesh

import model_port
from model_port.adapters import (
    AdapterBase,
    AdapterInfo,
    add_adapter,
    base_checksum,
    files_of_base,
    new_adapter,
    read_adapter_info,
)
from model_port.attention import allow_kernel, form_of
from model_port.attention.check import Heads, KernelCheck, check_kernel
from model_port.attention.choice import KERNEL_PLATFORMS, kernel_of
from model_port.config import NO_ADAPTERS, LoraConfig, read_config
from model_port.download import source_directory
from model_port.hf_files import CONFIG_FILE, HUB_ID, RECIPE_FILE, read_side_files, with_pixel_bounds, write_side_files
from model_port.layers import Compute
from model_port.layout import base_of, hf_files_of, is_adapter
from model_port.loading import base_directory
from model_port.model import VLModel
from model_port.output_dir import output_directory
from model_port.processing import VisionContract
from model_port.progress import Meter
from model_port.sharding import make_mesh, on_mesh, platform, warm_up_collectives
from model_port.terminal import say
from model_port.tiny import make_tiny
from paravt_jax.config import MIN_PIXELS, TINY, Config, EvalConfig, MeshConfig, PolicyConfig, SftConfig, written_dtype
from paravt_jax.run.hosts import ALONE, Hosts
from paravt_jax.run.recipe import Recipe, differences, recipe_of
from paravt_jax.run.start import check_cpu_size, describe_devices, fell_back, find_devices, size_of, start_line
from paravt_jax.run.threads import in_thread
from rollout.chat import Chat

HF_FILES_DIR = "hf_files"
MODEL_DIR = "model.path=DIR"  # the directory argument in errors


@dataclass(frozen=True, eq=False)
class Policy:
    """The model that a run starts from; `load` reads its parameters."""

    mesh: Mesh | None  # None: one device
    contract: VisionContract
    chat: Chat
    hf_files: Path  # config, tokenizer, processor and template, with this run's pixel limits
    source: Path  # a Hugging Face directory or a converted checkpoint
    compute: Compute
    name: str = ""  # of the source: a hub id or an absolute path
    adapter: Path | None = None  # a trained adapter that the run starts from
    lora: LoraConfig = NO_ADAPTERS  # the adapter to train
    seed: int = 0  # random seed for new adapters
    kernel_check: KernelCheck | None = None  # check of the accelerator's attention kernel, if model.attention=auto

    def load(self, *, is_frozen: bool = False) -> VLModel:
        """Loads parameters onto the mesh: in float32, or in the activations' dtype if only adapters or none train."""
        dtype = self.compute.dtype if self.lora.rank or is_frozen else "float32"
        with Meter(f"loading {self.adapter or self.source}"):
            model = model_port.load(self.adapter or self.source, dtype, self.mesh)
        if self.lora.rank and self.adapter is None:
            add_adapter(model, self.lora, new_adapter(model.config, self.lora, self.seed), self.mesh)
        model.compute = self.compute
        return model

    def attention(self, row_tokens: int) -> str:
        """The log line about attention. Raises if this device does not support model.attention."""
        with on_mesh(self.mesh):
            machine = platform()
        form = form_of(self.compute.attention, row_tokens, machine)
        if form == "kernel" and self.kernel_check is not None:
            return f"attention: {self.kernel_check}"
        return f"attention: {form} ({machine}, rows of {row_tokens} tokens)"

    def adapter_info(self, model: VLModel) -> AdapterInfo | None:
        """The adapter's metadata, or None without an adapter. Reads all base weights for their checksum."""
        dtype = self.compute.dtype
        if not self.lora.rank:
            return None
        base = AdapterBase(self.name, dtype, base_checksum(model, dtype), files_of_base(hf_files_of(self.source)))
        return AdapterInfo(self.lora, base)


async def policy_of(
    config: Config | SftConfig | EvalConfig, run_dir: Path, hosts: Hosts = ALONE, data: str = ""
) -> Policy:
    """Opens a run's policy without reading its parameters. `data` is the start line's text about the data."""
    recipe, lora = recipe_of(config), None if isinstance(config, EvalConfig) else config.lora
    devices = await in_thread(find_devices)

    def work() -> Policy:
        if lora is not None:
            _check_cpu_size(config.model.path, devices)
        return open_policy(config.model, config.mesh, recipe, lora, seed=config.seed, run_dir=run_dir)

    policy = await in_thread(lambda: hosts.host_0_first(work))
    if lora is not None:  # an adapter's base is known only now
        check_cpu_size(config.model.path, size_of(policy.hf_files), devices)
    if hosts.leads:
        servers = isinstance(config, EvalConfig) and config.engine.kind == "sglang"
        say(
            start_line(
                "SGLang's" if servers else describe_devices(devices, hosts.num),
                size_of(policy.hf_files),
                config.model.dtype,
                written_dtype(config),
                mesh=None if servers else config.mesh,
                model=config.model.path,
                data=data,
                run_dir=run_dir,
            )
        )
    if policy.mesh is not None:
        await in_thread(partial(first_collective, hosts, policy.mesh))
    if not (isinstance(config, EvalConfig) and config.engine.kind != "jax"):
        policy = await in_thread(partial(with_checked_kernel, policy, hosts))
    if isinstance(config, EvalConfig) and policy.kernel_check is not None:
        say(f"attention: {policy.kernel_check}")
    if line := differences(hf_files_of(policy.adapter or policy.source), recipe):
        say(line)
    return policy


def first_collective(hosts: Hosts, mesh: Mesh) -> None:
    """Runs a first collective together: CPU collectives time out if hosts reach it half a minute apart."""
    if hosts.num > 1:
        hosts.gather("mesh", None)
        warm_up_collectives(mesh)


def with_checked_kernel(policy: Policy, hosts: Hosts = ALONE) -> Policy:
    """Allows the accelerator's attention kernel if it passes its check on every host."""
    with on_mesh(policy.mesh):
        machine = platform()
    if policy.compute.attention != "auto" or machine not in KERNEL_PLATFORMS:
        return policy
    model = read_config(policy.hf_files)
    text = Heads(model.text.num_heads, model.text.num_kv_heads, model.text.head_dim, causal=True)
    vision = Heads(model.vision.num_heads, model.vision.num_heads, model.vision.head_dim, causal=False)
    with Meter("checking the attention kernel"):
        check = check_kernel(kernel_of(machine), text, vision, policy.compute.dtype)
    compute = policy.compute
    if all(hosts.gather("attention kernel", check.passed)):
        compute = replace(compute, attention=allow_kernel(compute.attention))
    elif check.passed:
        check = replace(check, failure="on another host")
    return replace(policy, compute=compute, kernel_check=check)


def contract_of_run(hf_dir: Path, max_pixels: int) -> VisionContract:
    """The vision contract of a run, which sets how frames are resized."""
    return replace(VisionContract.from_hf(hf_dir), min_pixels=MIN_PIXELS, max_pixels=max_pixels)


def open_policy(
    model: PolicyConfig, mesh: MeshConfig, recipe: Recipe, lora: LoraConfig | None = None, *, seed: int, run_dir: Path
) -> Policy:
    """Opens a policy with the prompts and pixels of `recipe`. `seed` is for random weights; None `lora`: frozen."""
    source, name, adapter = _source(model.path, seed, run_dir), model.path, None
    if is_adapter(source):
        adapter, source, name = source, base_directory(source), base_of(source)
        _check_adapter(adapter, lora)
    hf_dir = hf_files_of(source)
    chat = Chat.from_hf(hf_dir)  # before the copy below, whose path would be confusing in an error
    contract = contract_of_run(hf_dir, recipe.max_pixels)
    hf_files = run_dir / HF_FILES_DIR
    files = with_pixel_bounds(read_side_files(hf_dir), contract.min_pixels, contract.max_pixels)
    files[RECIPE_FILE] = recipe.to_bytes()
    held = {name: (hf_files / name).read_bytes() for name in files if (hf_files / name).is_file()}
    if held != files:
        with output_directory(hf_files, force=True, source=source) as directory:
            write_side_files(files, directory)
    several = mesh.num_devices > 1 or jax.process_count() > 1
    devices = make_mesh(mesh.data, mesh.fsdp, mesh.tensor) if several else None
    return Policy(
        mesh=devices,
        contract=contract,
        chat=chat,
        hf_files=hf_files,
        source=source,
        compute=Compute(model.dtype, model.attention, remat="full" if model.remat == "auto" else model.remat),
        name=name if HUB_ID.fullmatch(name) and not Path(name).is_dir() else str(source.absolute()),
        adapter=adapter,
        lora=lora or NO_ADAPTERS,
        seed=seed,
    )


def _check_cpu_size(path: str, devices: Sequence[Any]) -> None:
    """Rejects large models on a CPU before downloading weights. An adapter's base on the hub is checked later."""
    if path == TINY or not fell_back(devices):
        return
    hf_dir = hf_files_of(source_directory(path, MODEL_DIR, weights=False))
    if (hf_dir / CONFIG_FILE).is_file():
        check_cpu_size(path, size_of(hf_dir), devices)


def _check_adapter(adapter: Path, lora: LoraConfig | None) -> None:
    """Raises unless an adapter to train has the settings' rank and alpha."""
    trained = read_adapter_info(adapter).lora
    if lora is not None and lora != trained:
        raise ValueError(
            f"the adapter {adapter} has rank {trained.rank} and alpha {trained.alpha:g}, not lora.rank={lora.rank} and "
            f"lora.alpha={lora.alpha:g}: set lora.rank={trained.rank} lora.alpha={trained.alpha:g} to continue "
            f"its training, or merge it into its model first with python -m model_port.export --src "
            f"{quote(str(adapter))} --dst DIR"
        )


def _source(path: str, seed: int, run_dir: Path) -> Path:
    if path != TINY:
        return source_directory(path, MODEL_DIR)
    directory = run_dir / TINY
    if not directory.is_dir():
        make_tiny(directory, seed)
    return directory
