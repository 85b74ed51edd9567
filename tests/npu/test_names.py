"""`torch.npu` of the emulated card offers every name of torch_npu: each works as its namesake, or refuses by name."""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fusion.npu.emulator import frontend
from fusion.npu.emulator.frontend.refused import CLASSES, REASONS


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
memory_allocated max_memory_allocated memory_reserved max_memory_reserved reset_peak_memory_stats
memory_stats mem_get_info empty_cache set_device current_device device_count is_available synchronize Stream Event
stream current_stream default_stream set_stream manual_seed manual_seed_all get_rng_state set_rng_state initial_seed
device set_per_process_memory_fraction get_device_properties get_device_name is_bf16_supported get_amp_supported_dtype
is_autocast_enabled set_autocast_enabled get_autocast_dtype set_autocast_dtype""".split()


def test_the_names_are_those_of_torch_npu():
    assert len(REAL) == 145
    assert sorted(frontend.__all__) == sorted(one.name for one in REAL)
    assert all(hasattr(frontend, name) for name in frontend.__all__)
    assert set(REASONS) < set(frontend.__all__) and set(CLASSES) < set(REASONS)


def test_what_the_project_uses_is_in_every_version_and_works():
    in_every_version = {one.name for one in REAL if one.only_in is None}
    assert set(USED_BY_THE_PROJECT) <= in_every_version - set(REASONS)


def test_every_refused_name_raises_its_reason():
    for name, reason in REASONS.items():
        assert len(reason) > 20
        with pytest.raises(
            NotImplementedError, match=re.escape(f"torch.npu.{name}: not on the emulated NPU: {reason}")
        ):
            getattr(frontend, name)("any", argument=1)
    assert issubclass(type("Mine", (frontend.NPUGraph,), {}), frontend.NPUGraph), "a library may derive a class"


def test_every_name_that_works_takes_the_parameters_of_its_namesake():
    checked = [one for one in REAL if one.parameters is not None and one.name not in REASONS]
    assert len(checked) == 64
    for one in checked:
        assert list(inspect.signature(getattr(frontend, one.name)).parameters) == one.parameters, one.name


def test_options_are_checked_stored_and_reported(card):
    npu = torch.npu
    assert npu.is_jit_compile_false()
    npu.set_compile_mode(jit_compile=True)
    assert not npu.is_jit_compile_false()
    npu.set_compile_mode(jit_compile=False)
    assert npu.is_jit_compile_false()
    npu.set_option({"MM_BMM_ND_ENABLE": "disable", "ACL_OP_DEBUG_LEVEL": 1})
    assert not npu.get_mm_bmm_format_nd()
    npu.set_mm_bmm_format_nd(True)
    assert npu.get_mm_bmm_format_nd()
    with pytest.raises(ValueError, match="ACL_PRECISION_MODE should be in"):
        npu.set_option({"ACL_PRECISION_MODE": "round"})
    with pytest.raises(TypeError, match="must be a dict"):
        npu.set_option("jitCompile")
    npu.config.allow_internal_format = False
    assert npu.config.allow_internal_format is False
    with pytest.raises(AttributeError, match="no option 'allow_tf32'"):
        npu.config.allow_tf32  # noqa: B018


def test_precision_flags_have_the_defaults_of_the_real_card(card):
    npu = torch.npu
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True)
    npu.matmul.allow_hf32 = True
    assert npu.matmul.allow_hf32 and npu.conv.allow_hf32, "an option of its own"
    x = torch.randn(64, 64)
    assert torch.equal((x.to(card.torch_device) @ x.to(card.torch_device)).cpu(), x @ x), "permitted, not done"
    npu.matmul.allow_hf32 = False
    with pytest.raises(TypeError, match="must be a bool"):
        npu.matmul.allow_hf32 = 1


def test_ranges_appear_in_a_profile(card):
    mstx = torch.npu.mstx

    @mstx.mstx_range("decorated")
    def twice(x):
        return x * 2

    with torch.profiler.profile() as profile:
        outer = mstx.range_start("started", domain="engine")
        assert (mstx.range_push("outer"), mstx.range_push("inner")) == (0, 1)
        twice(torch.ones(2, device=card.torch_device))
        with mstx.annotate("annotated"):
            mstx.mark("here")
        assert (mstx.range_pop(), mstx.range_pop(), mstx.range_pop()) == (1, 0, -1)
        mstx.range_end(outer)
    names = {event.name for event in profile.events()}
    assert {"engine: started", "outer", "inner", "decorated", "annotated", "here"} <= names


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_legacy_storages(card):
    storage = torch.ones(4, device=card.torch_device).storage()
    assert isinstance(storage, torch.npu.FloatStorage) and not isinstance(storage, torch.npu.HalfStorage)
    assert not isinstance(torch.ones(4).storage(), torch.npu.FloatStorage)
    assert storage.type() == "torch.npu.FloatStorage"
    mine = torch.npu.BFloat16Storage(3)
    assert (mine.dtype, mine.device.type, mine.size()) == (torch.bfloat16, "npu", 3)
    with pytest.raises(RuntimeError, match="Not available for NPU storage"):
        torch.npu.FloatStorage.from_buffer(b"1234")


def test_the_blas_handle_is_none_and_said_so(card):
    with pytest.warns(UserWarning, match="does not use blas handle"):
        assert torch.npu.current_blas_handle() is None


def test_a_sync_launch_stream_is_a_stream(card):
    stream = torch.npu.SyncLaunchStream()
    with torch.npu.stream(stream):
        assert torch.npu.current_stream().npu_stream == stream.npu_stream
        x = torch.ones(8, device=card.torch_device) + 1
    stream.synchronize()
    assert x.sum().item() == 16
