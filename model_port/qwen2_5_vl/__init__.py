"""Qwen2.5-VL (3B, 7B, 32B, 72B): windows in the vision tower, chunked M-RoPE, biases on queries, keys and values."""
