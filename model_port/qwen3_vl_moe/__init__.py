"""Qwen3-VL's mixtures (30B-A3B, 235B-A22B): Qwen3-VL with experts in place of the language layers' MLP."""
