#!/usr/bin/env bash
# Make a virtual environment with Headrace in it; a second call does nothing unless the dependencies changed.
#
#   ./scripts/setup.sh             what `headrace` needs
#   ./scripts/setup.sh test,dev    with these extras of pyproject.toml
#
# VIRTUAL_ENV or HEADRACE_VENV names the environment (default .venv), PYTHON the interpreter that makes it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras="${1:-}"
venv="${VIRTUAL_ENV:-${HEADRACE_VENV:-.venv}}"
python="${PYTHON:-python3}"

if [[ ! -x "$venv/bin/python" ]]; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
        echo "setup: $python is missing or older than Python 3.10; name a newer one: PYTHON=python3.11 $0" >&2
        exit 2
    }
    "$python" -m venv "$venv" || {
        echo "setup: could not make $venv; on Debian and Ubuntu install the package python3-venv first" >&2
        exit 2
    }
fi

stamp="$venv/.headrace-$(printf '%s' "$extras" | tr -c 'a-z0-9' '-')"
wanted="$(cat pyproject.toml constraints.txt | sha256sum | cut -d' ' -f1)"
if [[ ! -f "$stamp" || "$(cat "$stamp")" != "$wanted" ]]; then
    echo "setup: installing headrace${extras:+[$extras]} into $venv (a few minutes the first time)" >&2
    "$venv/bin/python" -m pip install -qq --disable-pip-version-check -c constraints.txt -e ".${extras:+[$extras]}"
    # The CPU kernels are compiled now rather than in the first start; without a compiler torch's own are used.
    "$venv/bin/python" -c "from headrace.kernels._native import library; library()" || true
    echo "$wanted" >"$stamp"
fi
