"""From rewards to new weights: advantages, credit, packed rows, losses, the update. Independent of runs and data."""
