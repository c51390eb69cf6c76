#!/usr/bin/env bash
# Set up and pass every check: lint, format, structure, types, tests. Arguments go to pytest: ./scripts/test.sh tests/kvcache
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./scripts/setup.sh test,dev
./scripts/test_tools.sh
bin="$(cd "${VIRTUAL_ENV:-${HEADRACE_VENV:-.venv}}/bin" && pwd)"
export PATH="$bin:$PATH:${bin%/bin}/tools/usr/bin"

ruff check .
ruff format --check .
python tools/check.py
pyright --pythonpath "$bin/python"

# Two workers of one thread each suit two cores. pytest exits 5, and so does this script, when it collected nothing.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
python -m pytest -n "${HEADRACE_TEST_WORKERS:-2}" --dist loadscope --timeout 300 "$@"
