"""Qwen3-VL's MoE models (30B-A3B, 235B-A22B): Qwen3-VL with experts instead of the language layers' MLP."""
