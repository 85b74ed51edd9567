#!/usr/bin/env bash
# Trains a small model to count on for 8,192 digits; its base model stops after about 130. Its answers
# grow to 8,192 tokens. Two emulated NPUs share each sample in training (context parallelism) and generate separately. Creates the base model
# first; takes minutes, most of them in the last steps. Arguments are config overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
python scripts/make_base.py counting runs/base/counting
exec python scripts/train.py run.name=long-context run.steps=10 run.eval_prompts=4 model.path=runs/base/counting \
  cluster.npus=2 device=emulated parallel=single parallel.train.cp=2 data=counting data.max_digits=8192 \
  data.max_prompt_length=2 data.prompts_per_step=2 reward=counting rollout.max_response_length=8192 \
  algorithm=grpo algorithm.group_size=8 algorithm.minibatches=2 training.lr=3e-3 "training.betas=[0.9,0.99]" \
  training.weight_decay=0 training.load_balancing_coef=0 "$@"
