"""A card whose tensors have shapes and no memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fusion.npu.ledger import LedgerDevice


class MetaDevice(LedgerDevice):
    """Counts the bytes that its tensors would have, as every ledger."""

    kind, torch_device = "meta", torch.device("meta")


@contextmanager
def meta_card(capacity_bytes: int) -> Iterator[MetaDevice]:
    device = MetaDevice(0, capacity_bytes)
    try:
        yield device
    finally:
        device.close()
