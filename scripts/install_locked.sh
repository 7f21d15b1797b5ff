#!/usr/bin/env bash
# Installs locked releases into a virtual environment.   bash scripts/install_locked.sh VENV LOCK…
# uv takes a fifth of pip's time. It reads no configuration of pip, so it gets pip's index, and where it fails, pip installs.
set -euo pipefail
python=$1/bin/python uv=$1/bin/uv
shift
pip() { "$python" -m pip install --quiet --disable-pip-version-check --no-compile --require-hashes --no-deps "$@"; }
locks=()
for lock in "$@"; do locks+=(-r "$lock"); done

pip -r requirements/uv.txt
index=${PIP_INDEX_URL:-$("$python" -m pip config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX=$index; fi
"$uv" pip install --quiet --system-certs --python "$python" --require-hashes --no-deps "${locks[@]}" ||
  { echo "setup: uv could not install the packages, see above; trying pip" >&2; pip "${locks[@]}"; }
