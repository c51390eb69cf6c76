#!/usr/bin/env bash
# Set up, serve SmolLM2-135M on this machine's CPU, and ask it one question through the official openai client.
#
#   ./scripts/quickstart.sh          ends after the answer
#   ./scripts/quickstart.sh --keep   leaves the server running until Ctrl-C
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

./scripts/setup.sh client
bin="$(cd "${VIRTUAL_ENV:-${HEADRACE_VENV:-.venv}}/bin" && pwd)"
port="${PORT:-8000}"
if (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
    echo "quickstart: port $port is in use: choose another with PORT=..." >&2
    exit 2
fi

"$bin/headrace" pull smollm2
"$bin/headrace" serve smollm2 --port "$port" --log_level warning &
server=$!
trap 'kill -TERM $(jobs -p) 2>/dev/null || true; wait 2>/dev/null || true' EXIT

"$bin/python" examples/ask.py --port "$port" --wait 120 "What is the capital of France?" &
asking=$!
wait -n "$server" "$asking"  # a server that could not start ends this script with its status
wait "$asking"
if [[ "${1:-}" == "--keep" ]]; then
    echo "serving at http://127.0.0.1:$port/v1 until Ctrl-C" >&2
    wait $server
fi
