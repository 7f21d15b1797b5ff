"""Benchmarks and long tests that run from a clone: `python -m scripts.bench NAME [--json OUT]`."""
