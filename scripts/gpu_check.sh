#!/usr/bin/env bash
# One NVIDIA GPU, checked and measured in less than ten minutes; a page and JSON go to docs/benchmarks.
#   bash scripts/gpu_check.sh [--tiny]
# --tiny tries the check itself, on a CPU too, and leaves docs/benchmarks as it is.
# Needs a Python that has jax with CUDA and flax; torch and transformers for the comparison. PYTHON=… chooses it; by
# default .venv, else python3. Exit code 0 only if every part was done and agrees.
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
"$python" -m paravt_jax.bench gpu_check --json $to/gpu_check.json "$@" | tee "$page"
status=$?
[ ! -s "$page" ] || cp "$page" $to/gpu_check.md # what was refused printed nothing, and the page of before stays
rm "$page"
exit $status
