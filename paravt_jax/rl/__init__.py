"""The steps of an RL run: rollouts, batches, metrics."""
