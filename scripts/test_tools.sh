#!/usr/bin/env bash
# Programs that some tests run and that aren't Python packages: Chromium for the page, Prometheus and promtool for deploy/.
#
# As root on Debian and its kin what is missing is fetched with apt-get, in a few minutes at most. Anywhere else, and
# where there is no network, nothing is done and nothing fails: those tests are skipped, and say what they miss.
#
#   ./scripts/test_tools.sh       tells what it does on standard error
#   HEADRACE_TEST_TOOLS=0         keeps it from doing anything
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools="$(realpath -m "${VIRTUAL_ENV:-${HEADRACE_VENV:-.venv}}/tools")"
export PATH="$PATH:$tools/usr/bin" DEBIAN_FRONTEND=noninteractive

has() {
    command -v "$1" >/dev/null
}

missing=()
[[ -n "${HEADRACE_TEST_BROWSER:-}" ]] || has chromium || has chromium-browser || has google-chrome || missing+=(chromium)
{ has prometheus && has promtool; } || missing+=(prometheus)
if ((${#missing[@]} == 0)) || [[ "${HEADRACE_TEST_TOOLS:-1}" == 0 ]]; then
    exit 0
fi
if [[ "$(id -u)" != 0 ]] || ! has apt-get || ! has dpkg-deb; then
    echo "test tools: no ${missing[*]} here (as root with apt-get they would be fetched): their tests are skipped" >&2
    exit 0
fi

apt() { # SECONDS ARGUMENTS
    timeout --kill-after=10 "$1" apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20 \
        -o Acquire::https::Timeout=20 -o DPkg::Lock::Timeout=60 "${@:2}" </dev/null >/dev/null 2>&1
}

fetch() {
    case "$1" in
    chromium) apt 400 install -y --no-install-recommends chromium ;;
    prometheus) # unpacked, not installed: the package would start a service of the machine
        mkdir -p "$tools" && cd "$tools" && apt 120 download prometheus && dpkg-deb -x prometheus_*.deb . && rm prometheus_*.deb
        ;;
    esac
}

echo "test tools: fetching ${missing[*]} with apt-get" >&2
apt 120 update || true # an older list may do
for package in "${missing[@]}"; do
    (fetch "$package") || echo "test tools: $package could not be fetched: its tests are skipped" >&2
done
