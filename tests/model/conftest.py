from __future__ import annotations

import pytest

from fusion.npu import open_device


@pytest.fixture(scope="session", autouse=True)
def device():
    """The emulated card of the test process, opened before its first backward pass: autograd counts devices then."""
    return open_device("emulated")
