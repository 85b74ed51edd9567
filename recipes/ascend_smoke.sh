#!/usr/bin/env bash
# What to run first on a machine with Ascend cards: checks installation, devices, hccl, a switch, a model's operators and
# ten training steps in bfloat16, and writes ascend_smoke.json, a report to attach to an issue. Takes about two minutes.
# Arguments go to
# scripts/smoke.py: --cards 2, --stages device,hccl, --report FILE. Without a card: --device emulated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
for setup in /usr/local/Ascend/ascend-toolkit/set_env.sh /usr/local/Ascend/cann/set_env.sh; do
  if [ -z "${ASCEND_HOME_PATH:-}${ASCEND_TOOLKIT_HOME:-}" ] && [ -f "$setup" ]; then
    set +eu # CANN's script reads variables that may not be set
    # shellcheck disable=SC1090
    source "$setup"
    set -eu
  fi
done
source scripts/environment.sh
exec python scripts/smoke.py "$@"
