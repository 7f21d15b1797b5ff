"""The dense Qwen3-VL (2B, 4B, 8B, 32B): DeepStack, learned vision positions, interleaved M-RoPE."""
