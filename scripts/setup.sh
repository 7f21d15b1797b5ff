#!/usr/bin/env bash
# Creates .venv with Python 3.11+ and installs paravt_jax into it.   bash scripts/setup.sh [cpu|cuda12|tpu|dev]
# cpu, cuda12 and tpu install what runs need; dev is cpu plus the packages for scripts/test.sh, including torch.
# Re-running it does nothing until pyproject.toml, a lock, the Python or the kind changes. Every .venv also counts as cpu.
# PYTHON=/path/to/python3 sets the interpreter.
set -euo pipefail
usage="usage: bash scripts/setup.sh [cpu|cuda12|tpu|dev]"
kind=${1:-cpu}
case "$kind" in
  cpu | cuda12 | tpu | dev) ;;
  -h | --help) echo "$usage"; exit 0 ;;
  *) echo "$usage   (got '$kind')" >&2; exit 2 ;;
esac
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

# A second run waits for the first, and then has nothing to do. Open for writing, because NFS locks nothing else.
if [ -w scripts/setup.sh ]; then exec 9<>scripts/setup.sh; else exec 9<scripts/setup.sh; fi
flock --nonblock 9 || case $? in
  1) echo "setup: waiting for another setup of this clone" >&2; flock 9 ;;
  *) echo "setup: cannot lock this clone; do not run setup twice at the same time" >&2 ;; # some network file systems
esac

version_and_place() { # the place is None without pip: that venv was interrupted
  "$1" -c 'import sys, importlib.util as has
print("%d.%d.%d" % sys.version_info[:3], has.find_spec("pip") and sys.prefix)' 2>/dev/null
}
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [[ "$(version_and_place .venv/bin/python)" == *" $(pwd)/.venv" ]]; then
  python=.venv/bin/python
fi
command -v "$python" >/dev/null || { echo "setup: no '$python' found; install Python 3.11 or newer, or set PYTHON" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup: Python 3.11 or newer is needed, '$python' is $version; set PYTHON" >&2; exit 1; }

# A venv of another Python or moved from another folder is broken in ways that pip does not notice.
if [ -d .venv ] && [ "$(version_and_place .venv/bin/python)" != "$version $(pwd)/.venv" ]; then
  echo "setup: .venv is incomplete, or belongs to another Python or directory; recreating it"
  rm -rf .venv
fi

stamp=.venv/.setup-stamp
have=cpu from=
if [ -s "$stamp" ]; then read -r have from <"$stamp"; fi
if [ "$kind" = cpu ]; then kind=$have; fi
if [ "$have" != cpu ] && [ "$have" != "$kind" ]; then
  echo "setup: .venv was made for $have, and $kind needs a separate one because their libraries conflict:" \
    "remove it first (rm -rf .venv), or use another clone" >&2
  exit 1
fi
want="$version $(pwd) $(cat pyproject.toml scripts/setup.sh requirements/*.txt | cksum)"
if [ "$have $from" = "$kind $want" ]; then
  echo "setup: .venv is up to date ($kind)"
  exit 0
fi

# Python compiles modules when it imports them; that is a small part of the thousands of files.
pip() { .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
if [ ! -x .venv/bin/python ]; then
  "$python" -m venv .venv
fi
echo "$have" >"$stamp" # without the rest, so that an interrupted installation is not up to date
echo "setup: installing paravt_jax ($kind) into .venv (a few minutes the first time)"
(while sleep 30 >/dev/null 2>&1; do echo "setup: installing, $SECONDS s so far" >&2; done) 9>&- &
trap "kill $!" EXIT
# The lock lists all packages (scripts/lock.sh), so nothing need be resolved.
locks=("requirements/$kind.txt")
[ "$kind" != dev ] || locks+=(requirements/dev-data.txt)
bash scripts/install_locked.sh .venv "${locks[@]}"
# Without hashes, because builds from other indexes, such as the smaller one for CPUs, have other hashes.
[ "$kind" != dev ] || pip torch==2.13.0
pip --no-deps --no-build-isolation --editable .
echo "$kind $want" >"$stamp"
echo "setup: done; use .venv/bin/python, or: source .venv/bin/activate"
