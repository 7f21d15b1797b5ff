"""Turns rewards into new weights: advantages, credit, packing, losses and the update. Knows nothing of runs or data."""
