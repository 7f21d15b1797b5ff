"""Sampling from the learner's weights: the embedded engine, weights for other engines, and frames."""
