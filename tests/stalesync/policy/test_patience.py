"""Waiting for a card: it is reported while it is late, and given up only after the limit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stalesync.policy.patience import Patience


@given(
    begin_s=st.floats(0, 1e6),
    pauses_s=st.lists(st.floats(0.01, 50), max_size=100),
    limit_s=st.floats(1, 2000),
    warn_every_s=st.floats(1, 60),
)
def test_it_stops_after_the_limit_only_and_warns_at_its_interval(begin_s, pauses_s, limit_s, warn_every_s):
    patience, now_s, last_s = Patience(begin_s, limit_s=limit_s, warn_every_s=warn_every_s), begin_s, begin_s
    for pause_s in pauses_s:
        now_s += pause_s
        decision = patience.observe_waiting(now_s)
        assert (decision == "stop") == (now_s - begin_s > limit_s)
        if decision == "stop":
            return
        assert (decision == "warn") == (now_s - last_s > warn_every_s)
        last_s = now_s if decision == "warn" else last_s
