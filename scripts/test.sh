#!/usr/bin/env bash
# Installs the test extras and runs the tests. Arguments go to pytest: bash scripts/test.sh tests/model -k layouts
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=test
source scripts/environment.sh
exec python -m pytest "$@"
