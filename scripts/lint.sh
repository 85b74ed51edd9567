#!/usr/bin/env bash
# Style and types: ruff (rules, format) and mypy, as CI runs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=test
source scripts/environment.sh
ruff check .
ruff format --check .
mypy
