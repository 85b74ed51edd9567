from __future__ import annotations

import pytest
import torch

from fusion.npu import open_device


@pytest.fixture
def card():
    """A card of 60 MiB (1536 large pages) that nothing else uses, and the current one again afterwards as before."""
    device = open_device("emulated", index=9, capacity_bytes=60 << 20)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    device.empty_cache()
    device.reset_peak()
    assert device.memory().allocated == 0
    yield device
    torch.npu.set_device(0)
