"""Encode and decode frames between the pool and its children: `<index, size>` and a pickle, in both directions."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<II")
START = 0xFFFFFFFF
"""Index of the frame that a child sends before any sample: None, or why it cannot score."""


def pack(index: int, value: Any) -> bytes:
    """Encode one frame."""
    payload = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(index, len(payload)) + payload


def take_frames(buffer: bytearray) -> Iterator[tuple[int, Any]]:
    """Remove the complete frames at the front of `buffer` and yield them as (index, value)."""
    at = 0
    try:
        while len(buffer) - at >= HEADER.size:
            index, size = HEADER.unpack_from(buffer, at)
            end = at + HEADER.size + size
            if len(buffer) < end:
                break
            value = pickle.loads(memoryview(buffer)[at + HEADER.size : end])
            at = end
            yield index, value
    finally:
        del buffer[:at]
