#!/usr/bin/env bash
# Style and types: ruff (rules, format) and mypy, as CI runs them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh test
ruff check .
ruff format --check .
mypy
