#!/usr/bin/env bash
# What to run first on a machine with NVIDIA cards: the checks of recipes/ascend_smoke.sh, and cuda_smoke.json as its
# report. Takes the same arguments.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python scripts/smoke.py --device cuda "$@"
