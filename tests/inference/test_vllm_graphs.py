"""Graphs of vLLM are captured again on all ranks when weights or KV have moved on one of them, and not otherwise."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from fusion.inference.backends.support import MEMORY_CHECKED, engine_options
from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.backends.vllm_engine import VllmEngine


class Runner:
    """Records what would be run and captured."""

    max_num_tokens = 64

    def __init__(self):
        self.calls = []

    def _dummy_run(self, num_tokens, cudagraph_runtime_mode):
        self.calls.append((num_tokens, cudagraph_runtime_mode))

    def capture_model(self):
        self.calls.append("capture")


@pytest.fixture
def runner(monkeypatch):
    runner, modules = Runner(), {}
    for name in ("vllm", "vllm.config", "vllm.compilation", "vllm.compilation.cuda_graph"):
        modules[name] = ModuleType(name)
        monkeypatch.setitem(sys.modules, name, modules[name])
    clear = SimpleNamespace(clear_all_graphs=lambda: runner.calls.append("drop"))
    monkeypatch.setattr(modules["vllm.compilation.cuda_graph"], "CUDAGraphWrapper", clear, raising=False)
    monkeypatch.setattr(modules["vllm.config"], "CUDAGraphMode", SimpleNamespace(NONE="none"), raising=False)
    return runner


def core_of(runner, eager=False):
    core = object.__new__(VllmCore)
    core.runner, core.vllm_config = runner, SimpleNamespace(model_config=SimpleNamespace(enforce_eager=eager))
    core._captured, core._kv = [], [torch.empty(8)]
    return core


def engine_of(core, weights, other_rank):
    """An engine whose second rank finds its own addresses unmoved (1) or moved (0)."""
    engine = object.__new__(VllmEngine)
    engine.core, engine.model = core, SimpleNamespace(addresses=lambda: weights)
    engine.control = SimpleNamespace(min_over_ranks=lambda values: [min(values[0], other_rank[0])])
    engine._may_have_moved = True
    return engine


def test_graphs_are_captured_again_only_when_what_they_read_has_moved(runner):
    core, weights, other_rank = core_of(runner), [4096], [1]
    engine = engine_of(core, weights, other_rank)
    engine._capture()
    assert runner.calls == [(64, "none"), "capture"] and not engine._may_have_moved
    engine._capture()
    assert len(runner.calls) == 2, "nothing has moved"
    for move in (
        lambda: weights.append(8192),
        lambda: core._kv.append(torch.empty(8)),
        lambda: other_rank.insert(0, 0),
    ):
        runner.calls.clear()
        move()
        engine._capture()
        assert runner.calls == ["drop", (64, "none"), "capture"]


def test_eager_steps_capture_nothing(runner):
    engine_of(core_of(runner, eager=True), [4096], [1])._capture()
    assert runner.calls == []


@pytest.mark.parametrize("graphs", [False, True])
def test_options_of_a_card(graphs):
    for kind in ("emulated", "ledger"):
        assert engine_options(kind, graphs) == {"enforce_eager": True}
    beside_a_trainer = {"disable_custom_all_reduce": True, "gpu_memory_utilization": MEMORY_CHECKED}
    assert engine_options("npu", graphs) == beside_a_trainer | {"enforce_eager": True}
    cuda = engine_options("cuda", graphs)
    assert (
        cuda.items() >= (beside_a_trainer | {"moe_backend": "triton"}).items() and ("enforce_eager" in cuda) != graphs
    )
    assert ("compilation_config" in cuda) == graphs
