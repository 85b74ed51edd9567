#!/usr/bin/env bash
# Compares deployments and systems on emulated cards of modelled speed, and with the published figures, on one page:
# runs/compare/compare.html, in about ten minutes on two idle cores. --simulated adds the published model and cluster.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python benchmarks/compare.py "$@"
