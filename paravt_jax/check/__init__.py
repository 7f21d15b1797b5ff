"""Checks this machine at a model's size, in stages that each run in a separate process."""
