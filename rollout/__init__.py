"""Engines, episodes, tools and video. Never imports jax, so that it runs beside any learner."""
