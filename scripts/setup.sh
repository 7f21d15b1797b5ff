#!/usr/bin/env bash
# Makes .venv from nothing but Python 3.11+ and installs paravt_jax into it.   bash scripts/setup.sh [cpu|cuda12|tpu]
# Running it again is quick: nothing happens until pyproject.toml, the variant or the Python changes.
# PYTHON=/path/to/python3 chooses the interpreter.
set -euo pipefail
variant=${1:-cpu}
case "$variant" in
  cpu) extras=dev ;;
  cuda12 | tpu) extras=dev,$variant ;;
  *) echo "usage: bash scripts/setup.sh [cpu|cuda12|tpu]   (got '$variant')" >&2; exit 2 ;;
esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "setup: no '$python' found; install Python 3.11 or newer, or set PYTHON" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: Python 3.11 or newer is needed, '$python' is $version; set PYTHON" >&2; exit 1; }

stamp=.venv/.setup-stamp
want="$variant $version $(pwd) $(cat pyproject.toml scripts/setup.sh | cksum)"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ]; then
  echo "setup: .venv is up to date ($variant)"
  exit 0
fi

# A venv made by another Python or moved from another folder is broken in ways pip does not notice.
if [ -d .venv ] && [ "$(.venv/bin/python -c 'import sys; print("%d.%d.%d" % sys.version_info[:3], sys.prefix)' 2>/dev/null)" != "$version $(pwd)/.venv" ]; then
  echo "setup: .venv belongs to another Python or place; making it anew"
  rm -rf .venv
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
echo "setup: installing paravt_jax[$extras] into .venv (a few minutes the first time)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extras]"
# Only for the ranks of Qwen's vocabulary, which it ships as data: the tests rebuild the published tokenizer from them.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dashscope==2.0.2
echo "$want" >"$stamp"
echo "setup: done; use .venv/bin/python, or: source .venv/bin/activate"
