"""What `policy/supply.py` hands to engines, and the notes that go with it."""

import pytest

from fusion.rollout import RequestBuffer, SuspendedSample
from stalesync.policy.commands import Dispatch
from stalesync.policy.staleness import StalenessLedger
from stalesync.policy.supply import RunningEngines, Supply
from tests.stalesync.fake_cluster import spec_of


@pytest.mark.parametrize("waiting", [0, 1])
@pytest.mark.parametrize("starts", [False, True])
def test_the_kv_of_a_conversation_that_ends_while_away_is_freed_with_the_next_dispatch(waiting, starts):
    """Until then no request waits, or one that finds no room: nothing is dispatched."""
    spec = spec_of("separate", filters=True, keeps_kv=True, turns=True, num_engines=2)
    buffer, running = RequestBuffer(), RunningEngines(1)
    supply = Supply(spec, StalenessLedger(1, 4), buffer=buffer, running=running)
    num_first = spec.max_requests + 1
    buffer.add("g", [f"g/{member}" for member in range(num_first)], prompt_tokens=1, max_tokens=20)
    (first,) = supply.dispatch([0])
    assert not first.forget_by_engine and len(first.requests_by_engine[0].ids) == spec.max_requests
    supply.take_back(0, [SuspendedSample("g/0", 4, "g/0~4", (0, 0), 0, turn=True)])
    (second,) = supply.dispatch()  # the place that it has left is taken
    assert second.requests_by_engine[0].ids == [f"g/{num_first - 1}"]
    buffer.finish({"g/0": 4})
    if waiting:
        buffer.add("h", ["h/0"], prompt_tokens=1, max_tokens=20)
    assert not [*supply.dispatch()] and buffer.num("waiting") == waiting
    if starts:
        (told,) = supply.dispatch([1])
        assert told.starting == {1} and told.requests_by_engine[1].ids == ["h/0"][:waiting]
    else:
        buffer.finish({"g/1": 4})
        buffer.add("i", ["i/0"], prompt_tokens=1, max_tokens=20)
        (told,) = supply.dispatch()
        assert [*told.requests_by_engine] == [0]
    assert isinstance(told, Dispatch) and told.forget_by_engine == {0: ["g/0"]}
