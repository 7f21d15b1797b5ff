#!/usr/bin/env bash
# Fresh machine -> the whole test suite: setup, lint, types, tests.   bash scripts/test.sh [quick] [pytest arguments…]
# "quick" leaves out the tests marked slow, and with them the SGLang sidecar.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
select="not gpu"
if [ "${1:-}" = quick ]; then
  select="not gpu and not slow"
  shift
fi
bash scripts/setup.sh dev
case "$select" in *"not slow"*) ;; *) bash scripts/setup_sglang.sh cpu ;; esac
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/pyright
# Two processes, each with whole files: much of the suite waits for servers and compilers.
.venv/bin/python -m pytest -n 2 --dist loadfile -m "$select" "$@"
