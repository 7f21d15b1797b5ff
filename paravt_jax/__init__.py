"""The trainer: data, rewards, packing, losses, steps, checkpoints, evaluation and benchmarks."""

from importlib.metadata import version

__version__ = version("paravt_jax")
