"""One step of reinforcement learning after another: rollouts, batches, metrics."""
