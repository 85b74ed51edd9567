#!/usr/bin/env bash
# Trains a small model to find a number from 0 to 15 in five guesses, which are answered by "higher" and "lower": it must
# use what was said in earlier turns. The base model, which is created first in half a minute, guesses at random, and has
# learned only not to repeat a guess. On one emulated NPU, with the environment in a process of its own. Arguments are
# config overrides, such as run.seed=1 or stalesync.max_staleness=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
python scripts/make_base.py guess runs/base/guess
exec python scripts/train.py run.name=guess run.steps=80 model.path=runs/base/guess \
  cluster=one device=emulated parallel=single data=guess data.max_prompt_length=16 data.prompts_per_step=32 \
  environment=guess reward=environment rollout.max_response_length=32 run.eval_prompts=128 \
  algorithm=grpo algorithm.group_size=16 algorithm.minibatches=4 algorithm.clip_high=0.3 \
  training.lr=1e-3 training.schedule=cosine "training.betas=[0.9,0.99]" training.weight_decay=0 \
  training.load_balancing_coef=0 "$@"
