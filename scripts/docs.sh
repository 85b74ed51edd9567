#!/usr/bin/env bash
# Builds the documentation site into site/; fails at any warning, such as a broken link or anchor.
#   bash scripts/docs.sh            build
#   bash scripts/docs.sh serve      build, show at http://127.0.0.1:8000, rebuild at changes
# Installs requirements/docs.txt into an environment of its own, .venv-docs, once, and again only when it changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
environment=.venv-docs
stamp="$environment/.docs-$(sha256sum requirements/docs.txt | cut -c1-16)"
if [ ! -f "$stamp" ]; then
  python3 -m venv "$environment"
  "$environment/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements/docs.txt
  touch "$stamp"
fi
export NO_MKDOCS_2_WARNING=1 # of mkdocs-material, about a release that is not installed here
exec "$environment/bin/python" -m mkdocs "${@:-build}" --strict
