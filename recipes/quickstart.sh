#!/usr/bin/env bash
# Trains a small MoE base model on one-digit addition with GRPO, on four emulated NPUs: training in TP2 x EP2,
# generation in EP4 on the same cards. Once installed, takes two to three minutes on two cores. Arguments are config
# overrides, such as run.seed=1. fusion=separate, colocated (the default), full or hybrid chooses which roles share
# cards; in separate and hybrid half of the cards only generate, with two cards per engine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
device=emulated source scripts/environment.sh
layouts=tp2ep2_ep4
for argument in "$@"; do
  case $argument in fusion=separate|fusion=hybrid) layouts=tp2ep2_ep2 ;; fusion=*) layouts=tp2ep2_ep4 ;; esac
done
python scripts/make_base.py addition runs/base/addition
exec python scripts/train.py run.name=quickstart run.steps=80 model.path=runs/base/addition \
  cluster=four device=emulated parallel=$layouts data=addition data.max_prompt_length=8 reward=arithmetic \
  rollout.max_response_length=5 algorithm=grpo algorithm.group_size=8 algorithm.minibatches=2 algorithm.kl_coef=0.001 \
  training.lr=5e-4 "training.betas=[0.9,0.99]" training.weight_decay=0 training.load_balancing_coef=0 "$@"
