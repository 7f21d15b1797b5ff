"""Rewards into new weights: advantages, credit, packed rows, the loss, the update. Knows no run and no data."""
