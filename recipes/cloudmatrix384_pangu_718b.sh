#!/usr/bin/env bash
# Launches the training of Pangu 718B on one CloudMatrix 384 supernode: starts Ray on its hosts, starts the job in the
# layouts that scripts/plan.py recommends, and stops Ray (recipes/several_hosts.sh). Plan and trainer read the same
# description of the model and of a step's work, 512 x 16 responses of at most 15,360 tokens unless the overrides state
# others, but the job has never run: no Ascend card was available during development.
#   bash recipes/cloudmatrix384_pangu_718b.sh [--dry-run] (--hosts FILE | HOST...) -- model.path=FOLDER data.source=FILE [overrides]
#   bash recipes/cloudmatrix384_pangu_718b.sh --dry-run
# FILE has one host per line; the first host is the head. train=LAYOUT and infer=LAYOUT before the -- choose other
# layouts. Every host must accept ssh without a password, have this checkout at the same path with the packages of
# requirements/ascend.txt installed in its .venv, and source CANN's set_env.sh in non-interactive shells, too.
# --dry-run plans for the 768 dies, resolves hosts and config, and prints every command instead of running it; without
# hosts it uses placeholder names. It fails if the plan does not fit in memory.
set -euo pipefail
before=() overrides=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h|--help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit ;;
    --) shift; overrides=("$@"); break ;;
    *) before+=("$1") ;;
  esac
  shift
done
exec bash "$(dirname "${BASH_SOURCE[0]}")/several_hosts.sh" model=pangu_718b cluster=cloudmatrix384 "${before[@]}" \
  -- run.name=pangu-718b data.prompts_per_step=512 algorithm.group_size=16 data.max_prompt_length=1024 \
  rollout.max_response_length=15360 "${overrides[@]}"
