#!/usr/bin/env bash
# Writes requirements/*.txt, every release with its hashes, from pyproject.toml.   bash scripts/lock.sh [--upgrade]
# Keeps releases that still satisfy the constraints; --upgrade takes the newest ones. Other arguments go to
# `uv pip compile`, for example --upgrade-package NAME. Needs uv, which scripts/setup.sh installs.
#
# torch is not locked, because builds from other indexes, such as the smaller one for CPUs, have other hashes and other
# requirements under the same version. The setup scripts install its pinned version separately.
set -euo pipefail
CDPATH= cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" -h "* | *" --help "*) sed -n '2,4s/^# //p' scripts/lock.sh; exit 0 ;; esac
PATH="$(pwd)/.venv/bin:$PATH"
lock() { # NAME arguments…: their requirements, and those on stdin, into requirements/NAME.txt
  local file=requirements/$1.txt
  shift
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
    --no-emit-package torch --output-file "$file" "$@" - >/dev/null
}
overrides=$(mktemp)
trap 'rm "$overrides"' EXIT
build=setuptools
of_torch="filelock fsspec jinja2 networkx setuptools sympy typing_extensions" # and CUDA, which the tests do not need

lock uv "$@" <<<uv
lock cpu pyproject.toml "$@" <<<$build
lock cuda12 --extra cuda12 pyproject.toml "$@" <<<$build
lock tpu --extra tpu pyproject.toml "$@" <<<$build
echo "torch; sys_platform == 'none'" >"$overrides"
tr ' ' '\n' <<<"$of_torch" | lock dev --extra dev --overrides "$overrides" pyproject.toml "$@"
# Only for the ranks of Qwen's vocabulary, which it ships as data: the tests rebuild the published tokenizer from them.
lock dev-data --no-deps "$@" <<<dashscope==2.0.2
# 3.14 has no release of it.
echo "sgl-deep-ep==0.1.2.post1; python_version < '3.14'" >"$overrides"
lock sglang-cuda --overrides "$overrides" "$@" <<<sglang==0.5.23
lock sglang-cpu --no-deps "$@" <requirements/sglang-cpu.in
