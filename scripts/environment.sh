# Sourced by the recipes and by scripts/test.sh: activates a Python environment in which rlfusion is installed.
#   extra=test; source scripts/environment.sh     (without an extra: leave it unset)
# Uses the active virtual or conda environment; without one, creates and activates .venv. Installs once, and again only
# when setup.py or the extra changes.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
extra="${extra:-}"
if [ -z "${VIRTUAL_ENV:-}" ] && [ -z "${CONDA_PREFIX:-}" ]; then
  if [ ! -x "$root/.venv/bin/python" ]; then
    echo "creating an environment in $root/.venv"
    python3 -m venv "$root/.venv"
  fi
  # shellcheck disable=SC1091
  source "$root/.venv/bin/activate"
fi
stamp="${VIRTUAL_ENV:-$CONDA_PREFIX}/.rlfusion-$(cat "$root/setup.py" <(echo "$root $extra") | sha256sum | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  echo "installing rlfusion${extra:+ with the extra '$extra'} (a few minutes the first time)"
  python -m pip install --quiet --disable-pip-version-check -e "$root${extra:+[$extra]}"
  touch "$stamp"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}" TOKENIZERS_PARALLELISM=false
