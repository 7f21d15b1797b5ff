#!/usr/bin/env bash
# Creates .venv-sglang, the environment of the SGLang server, with Python 3.11+.
#   bash scripts/setup_sglang.sh [cpu|cuda]
# Re-running it does nothing until the pins, the variant, the Python or the directory changes.
# PYTHON=/path/to/python3 sets the interpreter; the default is the environment's, or python3 for a new one.
# cpu takes about a minute and 2.3 GB.
set -euo pipefail
torch=torch==2.13.0
sglang=sglang==0.5.23
variant=${1:-cpu}
usage="usage: bash scripts/setup_sglang.sh [cpu|cuda]"
case "$variant" in
  cpu | cuda) ;;
  -h | --help) echo "$usage"; exit 0 ;;
  *) echo "$usage   (got '$variant')" >&2; exit 2 ;;
esac
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv-sglang
python=${PYTHON:-python3}
if [ -z "${PYTHON:-}" ] && [ -x $venv/bin/python ]; then python=$(readlink -f $venv/bin/python); fi
command -v "$python" >/dev/null || { echo "setup_sglang: no '$python' found; install Python 3.11 or newer, or set PYTHON" >&2; exit 1; }
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "setup_sglang: Python 3.11 or newer is needed, '$python' is $version; set PYTHON" >&2; exit 1; }

# A second run waits for the first, and then has nothing to do. Open for writing, because NFS locks nothing else.
if [ -w scripts/setup_sglang.sh ]; then exec 9<>scripts/setup_sglang.sh; else exec 9<scripts/setup_sglang.sh; fi
flock 9

stamp=$venv/.setup-stamp
lock=requirements/sglang-$variant.txt
want="$variant $version $(pwd) $torch $sglang $(cksum <$lock)"
if [ -x $venv/bin/python ] && [ "$(cat $stamp 2>/dev/null)" = "$want" ]; then
  echo "setup_sglang: $venv is up to date ($variant)"
  exit 0
fi

# The stamp is written last, so a directory without the right one is incomplete or another variant; pip repairs neither.
if [ -e $venv ]; then
  echo "setup_sglang: $venv is incomplete or another variant; recreating it"
  rm -rf $venv
fi
"$python" -m venv $venv
pip() { $venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
echo "setup_sglang: installing $sglang ($variant) into $venv (a few minutes)"
(while sleep 30 >/dev/null 2>&1; do echo "setup_sglang: installing, $SECONDS s so far" >&2; done) 9>&- &
trap "kill $!" EXIT
# Without hashes, because builds from other indexes, such as the smaller one for CPUs, have other hashes.
[ "$variant" != cpu ] || pip $torch
bash scripts/install_locked.sh $venv $lock
[ "$variant" != cuda ] || pip $sglang # with the torch that it requires
echo "$want" >$stamp
echo "setup_sglang: done; python -m rollout.serve finds $venv/bin/python"
