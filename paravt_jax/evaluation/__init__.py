"""Evaluation: runs samples with bounded concurrency, logs each one, and writes a certificate per cell."""
