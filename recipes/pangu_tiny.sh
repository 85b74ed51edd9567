#!/usr/bin/env bash
# Trains a small model of Pangu's architecture (latent attention, sandwich norms, two dense and four sparse layers) on
# one-digit addition, on four emulated NPUs: training in TP2 x EP2 x PP2, generation in EP4 on the same cards. First
# makes the base model. Arguments are config overrides.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
python scripts/make_base.py addition runs/base/pangu-tiny --shape recipes/shapes/tiny/pangu.yaml
exec python scripts/train.py run.name=pangu-tiny run.steps=60 model.path=runs/base/pangu-tiny \
  cluster=four device=emulated parallel.train.tp=2 parallel.train.ep=2 parallel.train.pp=2 parallel.infer.ep=4 \
  data=addition data.max_prompt_length=8 reward=arithmetic rollout.max_response_length=5 algorithm=grpo \
  algorithm.group_size=8 algorithm.minibatches=2 algorithm.kl_coef=0.001 training.lr=5e-4 "training.betas=[0.9,0.99]" \
  training.weight_decay=0 training.load_balancing_coef=0 "$@"
