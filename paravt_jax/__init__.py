"""The trainer: data, rewards, packing, losses, steps, checkpoints, evaluation and benchmarks."""
