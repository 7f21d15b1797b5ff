"""Supervised fine-tuning on traces, the cold start before RL."""
