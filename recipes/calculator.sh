#!/usr/bin/env bash
# Trains a small model to add numbers of four digits with a calculator. The base model, which is created first in a few
# minutes, can repeat what it reads, and has seen calls of the tool for numbers of one and two digits only. On one
# emulated NPU, with the environment in a process of its own. Arguments are config overrides, such as run.seed=1 or
# stalesync.max_staleness=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
python scripts/make_base.py calculator runs/base/calculator
exec python scripts/train.py run.name=calculator run.steps=40 model.path=runs/base/calculator \
  cluster=one device=emulated parallel=single data=calculator data.min_digits=4 data.max_digits=4 \
  data.max_prompt_length=16 data.prompts_per_step=32 environment=calculator reward=environment \
  rollout.max_response_length=48 run.eval_prompts=128 algorithm=grpo algorithm.group_size=8 algorithm.minibatches=2 \
  training.lr=1e-3 "training.betas=[0.9,0.99]" training.weight_decay=0 training.load_balancing_coef=0 "$@"
