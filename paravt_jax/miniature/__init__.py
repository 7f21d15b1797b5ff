"""The paper's experiment at a size that a laptop runs: a small world, a cold start, and the arms of its table B."""
