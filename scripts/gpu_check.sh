#!/usr/bin/env bash
# Checks and measures one NVIDIA GPU in less than ten minutes; writes a page and JSON to docs/benchmarks.
#   bash scripts/gpu_check.sh [--tiny]
# --tiny tests the check itself, also on a CPU, and does not change docs/benchmarks.
# Needs a Python with jax for CUDA and flax, and torch and transformers for the comparison: PYTHON=…, else .venv, else
# python3. The exit code is 0 only if every part succeeded and agrees.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
to=docs/benchmarks
case " $* " in
  *" -h "* | *" --help "*) sed -n '2,7s/^# //p' scripts/gpu_check.sh; exit 0 ;;
  *" --tiny "*) to=$(mktemp -d) ;;
esac
python=${PYTHON:-}
if [ -z "$python" ]; then python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3); fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p $to
page=$(mktemp)
"$python" -m scripts.bench gpu_check --json $to/gpu_check.json "$@" | tee "$page"
status=$?
[ ! -s "$page" ] || cp "$page" $to/gpu_check.md # a rejected command prints nothing and keeps the old page
rm "$page"
exit $status
