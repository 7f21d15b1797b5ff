"""Prompts, in what order they are visited, and with how many frames."""
