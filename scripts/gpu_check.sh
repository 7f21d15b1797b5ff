#!/usr/bin/env bash
# Measures one NVIDIA GPU in less than ten minutes, then checks it with `paravt check`; writes a page and JSON to
# docs/benchmarks.
#   bash scripts/gpu_check.sh [--tiny]
# --tiny tests the check itself, also on a CPU, and does not change docs/benchmarks.
# Needs a Python with paravt_jax and jax for CUDA, and torch and transformers for the comparison: PYTHON=…, else .venv,
# else python3. The exit code is 0 only if every part succeeded and agrees.
set -uo pipefail
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
to=docs/benchmarks
model="--model 8b --layers 4 --recipe configs/8b_lora_1x80gb.yaml"
case " $* " in
  *" -h "* | *" --help "*) sed -n '2,8s/^# //p' scripts/gpu_check.sh; exit 0 ;;
  *" --tiny "*) to=$(mktemp -d) model=--quick ;;
esac
python=${PYTHON:-}
if [ -z "$python" ]; then python=$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3); fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$to"
page=$(mktemp)
"$python" -m scripts.bench gpu_check --json "$to/gpu_check.json" "$@" | tee "$page"
status=$?
if [ -s "$page" ]; then # a rejected command prints nothing and keeps the old page
  "$python" -m paravt_jax.check $model --stage files logits gradient step --json "$to/check.json" | tee -a "$page" ||
    status=$?
  cp "$page" "$to/gpu_check.md"
fi
rm "$page"
exit $status
