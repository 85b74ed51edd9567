from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fusion.npu import Device, open_device


@pytest.fixture(scope="module", params=["eager", "adversarial", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """A card with streams that are done at once, one with streams as late as they may be, and a real one."""
    yield from [open_device("cuda")] if request.param == "cuda" else _emulated(request.param)


@pytest.fixture(scope="module")
def late_device():
    yield from _emulated("adversarial")


def _emulated(streams: str) -> Iterator[Device]:
    late = streams == "adversarial"
    card = open_device("emulated", index=9 if late else 0, capacity_bytes=(96 << 20) if late else None, streams=streams)
    if late and card.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    yield card
    card.synchronize()
    if card.kind == "emulated":
        torch.npu.set_device(0)
