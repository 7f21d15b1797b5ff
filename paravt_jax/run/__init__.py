"""Infrastructure of all runs: directory, log, checkpoints, process, policy. It does not use rl, imitation or data."""
