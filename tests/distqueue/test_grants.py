"""Files granted in advance: each serves one put that it fits, or is given back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distqueue.grants import MAX_GRANTS, Grants
from distqueue.messages import File

LEASE_S = 10.0
SIZES = st.sampled_from([4096, 8192, 20480, 81920, 1 << 20])
STEPS = st.lists(
    st.tuples(st.sampled_from(["keep", "keep", "take", "take", "clear"]), SIZES, st.sampled_from([0.0, 1.0, 4.0])),
    max_size=30,
)


@given(STEPS)
def test_a_grant_is_taken_once_in_time_and_if_it_fits_or_cancelled_once(steps) -> None:
    cancelled: list[File] = []
    grants, kept, now_s = Grants(cancelled.append), dict[File, float](), 0.0
    for number, (step, nbytes, passed_s) in enumerate(steps):
        now_s += passed_s
        before, taken = len(cancelled), None
        if step == "keep":
            file = File(number, f"/{number}", nbytes, "s", node="n", durable=False, lease_s=LEASE_S)
            grants.keep(file, now_s)
            kept[file] = now_s + LEASE_S / 2
        elif step == "clear":
            grants.clear()
        else:
            fitting = [file for file, until_s in kept.items() if until_s > now_s and file.fits(nbytes)]
            taken = grants.take(nbytes, now_s)
            assert taken == min(fitting, key=lambda file: file.size, default=None)
        for file in (*cancelled[before:], *([] if taken is None else [taken])):
            del kept[file]  # a KeyError: it was taken or cancelled before
        assert len(kept) <= (0 if step == "clear" else MAX_GRANTS)
        assert step == "keep" or all(until_s > now_s for until_s in kept.values())
