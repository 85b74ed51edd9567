import gc

import pytest

from tests.inference import engines


@pytest.fixture(scope="module", autouse=True)
def card_is_left():
    """Others in this process may open the card with another capacity, whatever ran before."""
    yield
    engines.model.cache_clear()
    engines.card.cache_clear()
    gc.collect()


@pytest.fixture(params=["fused", "composed"])
def operators(request, monkeypatch):
    """Runs a test with the fused operators, then with the functions that stand in for them where there are none."""
    if request.param == "composed":
        monkeypatch.setattr("fusion.npu.operators.cpu.load", lambda: None)
