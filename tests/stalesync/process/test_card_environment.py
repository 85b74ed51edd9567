"""The variables with which the processes of Ascend cards start."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.costmodel.hardware import hardware_named
from stalesync.process.card_environment import (
    CONNECT_TIMEOUT_S,
    HCCL_BYTES,
    MAX_BUFFER_MB,
    card_environment,
    cores_of,
    describe,
    exported_here,
    without,
)


@given(cards=st.integers(1, 100_000), communicators=st.integers(0, 2_000))
def test_the_buffers_of_all_communicators_fit_into_what_the_cost_model_leaves_to_them(cards, communicators):
    variables = card_environment("npu", cards=cards, communicators=communicators)
    buffer_mb, timeout_s = int(variables["HCCL_BUFFSIZE"]), int(variables["HCCL_CONNECT_TIMEOUT"])
    assert 1 <= buffer_mb <= MAX_BUFFER_MB
    assert buffer_mb == 1 or 2 * communicators * buffer_mb << 20 <= HCCL_BYTES
    assert communicators > 5 or buffer_mb == MAX_BUFFER_MB
    assert CONNECT_TIMEOUT_S[0] <= timeout_s <= CONNECT_TIMEOUT_S[1]


@pytest.mark.parametrize("card", ["ascend_910b", "ascend_910c"])
def test_the_cost_model_leaves_as_much_again_to_the_rest_of_the_runtime(card):
    assert 2 * HCCL_BYTES <= hardware_named(card).reserved_bytes.value


@pytest.mark.parametrize("kind", ["cuda", "emulated"])
def test_other_cards_need_none(kind):
    assert card_environment(kind, cards=768, communicators=10) == {}


@pytest.mark.parametrize("kind", ["npu", "cuda", "emulated"])
def test_sums_have_one_order_where_that_is_asked_for(kind, monkeypatch):
    added = dict(card_environment(kind, deterministic=True).items() - card_environment(kind).items())
    wanted = {"npu": ("HCCL_DETERMINISTIC", "true"), "cuda": ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")}
    assert added == dict([wanted[kind]] if kind in wanted else [])
    for name in added:
        monkeypatch.setenv(name, "exported")
    assert added.keys() <= exported_here().keys()


def test_what_is_exported_stays(monkeypatch):
    variables = card_environment("npu", cards=768, communicators=10)
    for name in variables:
        monkeypatch.delenv(name, raising=False)
    assert exported_here() == {}
    monkeypatch.setenv("HCCL_BUFFSIZE", "77")
    monkeypatch.setenv("HCCL_IF_IP", "10.0.0.1")
    assert exported_here() == {"HCCL_BUFFSIZE": "77"}
    left = without(variables, exported_here())
    assert left == {name: value for name, value in variables.items() if name != "HCCL_BUFFSIZE"}
    told = describe(variables, exported_here())
    assert "HCCL_BUFFSIZE=77 (exported)" in told and "HCCL_CONNECT_TIMEOUT=1656" in told


def test_it_is_decided_without_torch_and_ray():
    code = "import sys, stalesync.process.card_environment; print({'torch', 'ray', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout.strip() == "set()", done.stderr


@given(st.sets(st.integers(0, 15), min_size=1), st.sets(st.integers(0, 400), min_size=1))
def test_the_cards_of_a_host_share_its_cores_evenly_and_none_twice(cards, cores):
    names = [str(card) for card in cards]
    parts = {name: cores_of(name, names, cores) for name in names}
    if len(cores) < len(cards):
        assert all(part == cores for part in parts.values())
        return
    assert {len(part) for part in parts.values()} == {len(cores) // len(cards)}
    assert sum(map(len, parts.values())) == len(set().union(*parts.values()))
    assert cores_of("99", names, cores) == cores
    in_order = sorted(cards)
    if in_order[1:]:
        assert max(parts[str(in_order[0])]) < min(parts[str(in_order[1])])
