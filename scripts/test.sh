#!/usr/bin/env bash
# Sets up a fresh machine and runs the test suite: lint, types, tests.
#   bash scripts/test.sh [quick|nightly] [model|rollout|train|ahead] [pytest arguments…]
# "quick" skips the tests marked slow, and the SGLang sidecar; "nightly" also runs the longest tests: faults on real
# servers, kernels, the GPU check on a CPU, several hosts. A part's name skips the other parts: model is model_port,
# rollout is rollout, train is paravt_jax. "ahead" installs the compilers of GPUs and TPUs, and runs the tests that are
# skipped without them: kernels and recipes compiled for them. The ten slowest tests are listed at the end.
set -euo pipefail
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONDONTWRITEBYTECODE= # hundreds of the tests' processes import the same libraries
select="not gpu and not nightly" sidecar=yes tests=() compilers=
while [ $# -gt 0 ]; do
  case "$1" in
    quick) select="not gpu and not slow and not nightly" sidecar= ;;
    nightly) select="not gpu" ;;
    model) tests+=(tests/model_port) ;;
    rollout) tests+=(tests/rollout) ;;
    train) tests+=(tests/paravt_jax) ;;
    ahead) compilers=yes sidecar= tests+=(tests/paravt_jax/plan tests/paravt_jax/bench/test_mesh.py) ;;
    -h | --help) sed -n '2,8s/^# //p' scripts/test.sh; exit 0 ;;
    *) break ;;
  esac
  shift
done
# Both environments are installed in parallel, because installing is half waiting and half unpacking.
if [ -n "$sidecar" ]; then bash scripts/setup_sglang.sh cpu & sidecar=$!; fi
trap wait EXIT # also when the lint fails
bash scripts/setup.sh dev
[ -z "$compilers" ] || .venv/bin/python -m pip install --quiet --no-compile --editable ".[dev,aot-gpu,aot-tpu]"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
types=$(mktemp)
.venv/bin/pyrefly check > "$types" 2>&1 & checking=$!
# In a fresh clone, compiles the bytecode once, because all pytest processes start together. They report any errors again.
[ -d tests/__pycache__ ] || .venv/bin/python -m pytest -qq --collect-only -m "$select" ${tests[@]+"${tests[@]}"} "$@" >/dev/null || true
[ -z "$sidecar" ] || wait "$sidecar"
status=0
# Four processes for two cores, because tests also wait: for servers, deadlines and disks.
.venv/bin/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --durations=10 -m "$select" ${tests[@]+"${tests[@]}"} "$@" || status=$?
wait "$checking" || status=$?
cat "$types" && rm "$types"
exit "$status"
