"""Each name that `torch.npu` of the emulated card offers is one of torch_npu, with the same parameters."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from fusion.npu.emulator import frontend


@dataclass(frozen=True)
class RealName:
    name: str
    parameters: list[str] | None
    only_in: str | None

    @classmethod
    def read(cls, line: str) -> RealName:
        name, parameters, only_in = re.fullmatch(r"(\w+)(?:\((.*)\))?(?: @(\S+))?", line).groups()
        listed = None if parameters is None else [one.strip("*") for one in parameters.split(", ") if one.strip("*")]
        return cls(name, listed, only_in)


REAL = [
    RealName.read(line)
    for line in (Path(__file__).parent / "torch_npu_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
USED_BY_THE_PROJECT = """
memory_allocated max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats memory_stats
memory_stats_as_nested_dict mem_get_info empty_cache set_device current_device device_count is_available synchronize
Stream Event stream current_stream default_stream set_stream manual_seed manual_seed_all get_rng_state set_rng_state
device set_per_process_memory_fraction get_device_name get_amp_supported_dtype NPUGraph graph""".split()


def test_the_names_are_those_of_torch_npu():
    assert len(REAL) == 145
    assert set(USED_BY_THE_PROJECT) <= set(frontend.__all__) <= {one.name for one in REAL}
    assert all(hasattr(frontend, name) for name in frontend.__all__)


def test_what_the_project_uses_is_in_every_version():
    assert set(USED_BY_THE_PROJECT) <= {one.name for one in REAL if one.only_in is None}


def test_a_name_that_is_not_offered_is_refused():
    with pytest.raises(AttributeError, match="make_graphed_callables"):
        frontend.make_graphed_callables  # noqa: B018


def test_every_name_takes_the_parameters_of_its_namesake():
    checked = [one for one in REAL if one.parameters is not None and one.name in frontend.__all__]
    assert len(checked) == 32
    for one in checked:
        assert list(inspect.signature(getattr(frontend, one.name)).parameters) == one.parameters, one.name
