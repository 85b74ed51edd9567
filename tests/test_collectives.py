"""What ranks exchange over a process group is tensors and JSON: a pickle would run what a peer sends."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PICKLING = re.compile(r"\b(?:\w+_object|\w+_object_list)\(")
"""Calls of torch.distributed's collectives of objects"""


@pytest.mark.parametrize("room", ["distqueue", "fusion", "stalesync"])
def test_no_pickle_crosses_a_process_group(room):
    assert PICKLING.search("dist.all_gather_object(a, b)") and PICKLING.search("broadcast_object_list([a])")
    found = {
        path: calls
        for path in (ROOT / room).rglob("*.py")
        if "torch.distributed" in (text := path.read_text()) and (calls := PICKLING.findall(text))
    }
    assert not found
