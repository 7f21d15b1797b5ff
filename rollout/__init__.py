"""Engines, episodes, tools and video. This package never imports jax, so it works with any learner."""
