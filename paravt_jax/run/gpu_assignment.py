"""Assigns this machine's GPUs to the SGLang servers and the learner, without overlap.

JAX and SGLang both preallocate GPU memory. CUDA_VISIBLE_DEVICES sets each process's GPUs. A process reads the variable
when it first uses a GPU, so the learner's is set before jax starts a backend. `engine.gpus` are indices into the GPUs
visible to this process, which may have any names: 0, 5, GPU-4f2c…, a MIG instance.
"""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from model_port.terminal import say
from paravt_jax.config import EngineConfig

VISIBLE = "CUDA_VISIBLE_DEVICES"

Gpus = tuple[str, ...]  # in the format of CUDA_VISIBLE_DEVICES


def place_servers(
    engine: EngineConfig, num_learner: int, environment: MutableMapping[str, str] = os.environ
) -> tuple[Gpus, ...]:
    """Returns the GPUs of each server that the run starts, and hides them from this process.

    `num_learner` is the number of the learner's devices, 0 without a learner. Without visible GPUs, servers get none.
    """
    if not engine.starts_servers:
        return ()
    visible = visible_gpus(environment, _num_gpus())
    if not visible and not engine.gpus:
        say("servers: no GPU is visible, so they compute on the CPU")
        return ()
    if engine.kind == "openai" and not engine.gpus:
        engine = replace(engine, gpus=list(range(engine.num_servers)))
    servers, learner = split_gpus(engine, num_learner, visible)
    environment[VISIBLE] = ",".join(learner)
    return servers


def split_gpus(engine: EngineConfig, num_learner: int, visible: Sequence[str]) -> tuple[tuple[Gpus, ...], Gpus]:
    """Splits `engine.gpus` evenly over the servers; the learner gets the other visible GPUs. Returns both."""
    if not engine.gpus:
        raise ValueError(
            f"engine.gpus is empty, but the {engine.num_servers} servers that this run starts need GPUs: give the "
            f"numbers of some of the {len(visible)} visible GPUs, or engine.urls of running servers"
        )
    if absent := [number for number in engine.gpus if number >= len(visible)]:
        raise ValueError(
            f"engine.gpus={engine.gpus}: there is no GPU {absent[0]}; {len(visible)} GPUs are visible, counted from 0 "
            f"({VISIBLE} can hide GPUs)"
        )
    learner = tuple(name for number, name in enumerate(visible) if number not in engine.gpus)
    if num_learner not in (0, len(learner)):
        raise ValueError(
            f"mesh.data x mesh.fsdp x mesh.tensor = {num_learner}, and engine.gpus={engine.gpus} leaves {len(learner)} "
            f"of {len(visible)} GPUs to the learner; make them equal, or hide GPUs with {VISIBLE}"
        )
    each = len(engine.gpus) // engine.num_servers
    starts = range(0, len(engine.gpus), each)
    return tuple(tuple(visible[n] for n in engine.gpus[at : at + each]) for at in starts), learner


def visible_gpus(environment: Mapping[str, str], num_gpus: int) -> Gpus:
    """The names of visible GPUs. CUDA ignores names after the first invalid name, for example -1."""
    if VISIBLE not in environment:
        return tuple(map(str, range(num_gpus)))
    names = (name.strip() for name in environment[VISIBLE].split(","))
    return tuple(takewhile(lambda name: name and not name.startswith("-"), names))


def num_visible_gpus() -> int:
    return len(visible_gpus(os.environ, _num_gpus()))


def _num_gpus() -> int:
    """The number of GPUs of this machine or container, counted without starting CUDA."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
