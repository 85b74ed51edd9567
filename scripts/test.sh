#!/usr/bin/env bash
# Installs the test extras and runs the tests, in two processes: much of the time each waits for processes it started.
# Arguments go to pytest instead, in one: bash scripts/test.sh tests/model -k layouts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=test
source scripts/environment.sh
[ $# -gt 0 ] || set -- -n 2 --dist worksteal
exec python -m pytest "$@"
