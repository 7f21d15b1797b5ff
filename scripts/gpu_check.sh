#!/usr/bin/env bash
# One NVIDIA GPU, checked and measured in less than ten minutes; a page and JSON go to docs/benchmarks.
#   bash scripts/gpu_check.sh [--tiny]
# Needs a Python that has jax with CUDA and flax; torch and transformers for the comparison. PYTHON=… chooses it; by
# default .venv, else python3. Exit code 0 only if every part was done and agrees.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-}
if [ -z "$python" ]; then python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3); fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p docs/benchmarks
"$python" -m paravt_jax.bench gpu_check --json docs/benchmarks/gpu_check.json "$@" | tee docs/benchmarks/gpu_check.md
