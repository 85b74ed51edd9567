#!/usr/bin/env bash
# Trains on sums whose answers write out every step, 40 to 80 tokens (data.max_digits=8: up to 155), to exercise paging,
# chunked prefill and long-tailed lengths. First creates the base model, which takes a few minutes. Arguments are config
# overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
python scripts/make_base.py worked_arithmetic runs/base/long-answers
exec python scripts/train.py run.name=long-answers run.steps=30 model.path=runs/base/long-answers \
  cluster=four device=emulated parallel=tp2ep2_ep4 data=worked data.max_prompt_length=64 data.prompts_per_step=64 \
  reward=arithmetic rollout.max_response_length=96 algorithm=grpo algorithm.group_size=8 \
  algorithm.minibatches=2 training.lr=3e-4 training.warmup_steps=6 "training.betas=[0.9,0.99]" training.weight_decay=0 training.load_balancing_coef=0 "$@"
