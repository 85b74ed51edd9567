#!/usr/bin/env bash
# Trains on your own questions and answers: a JSONL file with the fields `question` and `answer`, scored by math-verify.
#   bash recipes/math_jsonl.sh FILE.jsonl MODEL_FOLDER [overrides]
# MODEL_FOLDER is any Qwen3 or Qwen3-MoE checkpoint with its tokenizer. Without a card the NPU is emulated, with 2 GiB of
# HBM and float32 weights: too little for Qwen3-0.6B. Add model=bfloat16 and device.capacity_bytes=BYTES: about 18 bytes
# per parameter, and activations.
set -euo pipefail
[ $# -ge 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2; exit 2; }
questions=$(realpath "$1") model=$(realpath "$2")
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
exec python scripts/train.py run.name=math-jsonl model.path="$model" data=file data.source="$questions" \
  data.max_prompt_length=512 data.long_prompts=skip reward=math rollout.max_response_length=1024 "$@"
