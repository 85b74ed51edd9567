"""No step of a trainer or an engine calls what a card runs slowly: of an NPU what its host or AiCPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fusion.inference import Request, SamplingParams
from fusion.npu import open_device
from fusion.npu.operators import Plain, operators_of
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from tests.costmodel.launch_counts import card_with
from tests.inference.engines import engine, generate
from tests.training.ranks import LONGEST, Case, make_engine
from tests.training.test_repeatable import BY_SEQUENCE, batch_of, checkpoint

SORTS = {"sort", "argsort", "msort", "unique_consecutive", "_unique2", "unique_dim"}
NOT_ON_NPU = {"bincount", "nextafter"}


class SlowOperations(TorchDispatchMode):
    """Collects sorts of integers on the emulated card, and operations without a kernel on an NPU; and ``parts``: the
    gradients of slices, each of which fills a tensor as large as the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.parts: list[str] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operation.name().split("::")[1].split(".")[0]
        if name in NOT_ON_NPU | SORTS and args[0].device.type == "npu":
            if name in NOT_ON_NPU or not args[0].is_floating_point():
                self.found.append(name)
        if name in ("slice_backward", "select_backward"):
            self.parts.append(name)
        return operation(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize("table", ["plain", "ascend"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_no_training_step_does(kind: str, table: str) -> None:
    """With truncated sampling, shared prefixes and replayed routing."""
    with card_with(table, index=6) as device:
        trainer = make_engine(Case(checkpoint(kind), training=BY_SEQUENCE), device)
        algorithm = make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST)
        with SlowOperations() as slow:
            for step in range(2):
                trainer.forward_backward(algorithm.weigh(batch_of(trainer, step)), algorithm.loss)
                trainer.optimizer_step()
    assert not slow.found


@pytest.mark.parametrize("params", [{}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_no_step_of_an_engine_does(params: dict[str, Any]) -> None:
    made = engine(torch.bfloat16, routing=True)
    wanted = [Request(f"r{index}", (2, 3 + index), SamplingParams(max_tokens=6, **params)) for index in range(3)]
    with SlowOperations() as slow:
        assert len(generate(made, wanted)) == 3
    made.release_kv()
    assert not slow.found


def test_the_gradient_of_packed_attention_takes_no_sequence_out_of_the_whole() -> None:
    q, k = (torch.randn(21, heads, 8, requires_grad=True) for heads in (4, 2))
    with SlowOperations() as slow:
        Plain().varlen_attention(q, k, k, [1, 2, 3, 4, 5, 6]).sum().backward()
    assert not slow.parts


def test_slow_operations_are_found() -> None:
    ids = torch.tensor([2, 0, 1]).to(open_device("emulated").torch_device)
    assert operators_of("emulated", "plain").permute(torch.ones(3, 2, device=ids.device), ids.view(3, 1), 3)
    x = torch.ones(4, requires_grad=True)
    with SlowOperations() as slow:
        ids.argsort(), ids.sort(), ids.bincount(), ids.float().sort(), x[1:].sum().backward()
    assert len(slow.found) == 3 and slow.parts == ["slice_backward"]
