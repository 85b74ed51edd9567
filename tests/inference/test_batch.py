"""A step's tensors come to the card by one copy, whatever the step computes."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fusion.inference import batch
from fusion.inference.request import Request, SamplingParams
from tests.inference.engines import engine


class CopiesToCard(TorchDispatchMode):
    """Counts operations with a tensor on the host, and one on the card in what they return."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        here, there = (
            {one.device.type for one in tree_leaves(tree) if hasattr(one, "device")} for tree in (args, result)
        )
        self.count += "cpu" in here and "npu" in there
        return result


def requests(lengths):
    return [
        Request(f"r{n}", tuple(2 + token % 30 for token in range(length)), SamplingParams(max_tokens=40))
        for n, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_step_sends_its_arrays_to_the_card_at_once(monkeypatch, invariant, operators):
    copies, kinds, send = [], set(), batch.BatchPlan.send

    def counted(plan, device):
        with CopiesToCard() as counter:
            built = send(plan, device)
        copies.append(counter.count)
        kinds.add((built.sampled is None, bool(built.packed[2]), bool(built.long), len(built.rows) > 0))
        return built

    monkeypatch.setattr(batch.BatchPlan, "send", counted)
    made = engine(max_seqs=8, max_batch_tokens=24, batch_invariant=invariant)
    made.submit(requests([20, 3, 25, 30, 1, 60]))
    made.run()
    assert set(copies) == {1} and len(copies) > 40
    assert (True, False, False, True) in kinds and len(kinds) > 1
    if not invariant:
        assert {kind[1:3] for kind in kinds} >= {(True, False), (False, True)}, "whole prompts, and long chunks"


def test_a_step_without_rows_is_built_too():
    from fusion.inference.sequence import EngineStep

    made = engine()
    built = batch.plan_batch(EngineStep([], [], []), made.cache).send(made.cache.device)
    assert len(built.ids) == len(built.slots) == 0 and built.sampled is None and built.ids.dtype == torch.int64
