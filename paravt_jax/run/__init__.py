"""Shared run infrastructure: directory, log, checkpoints, process, policy. Independent of rl, imitation and data."""
