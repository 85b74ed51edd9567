#!/usr/bin/env bash
# Compares deployments and systems on emulated cards of modelled speed, and with the published figures, on one page:
# runs/compare/compare.html. Takes at most 12 minutes on two cores. --simulated adds the published model and cluster.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python benchmarks/compare.py "$@"
