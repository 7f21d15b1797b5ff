"""Rows as published, made ready and read; prompts, in what order they are visited, and with how many frames."""
