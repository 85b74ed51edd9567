from hypothesis import given
from hypothesis import strategies as st

from fusion.colocate.frozen.residency import choose_residency, exchange_order

UNITS = st.lists(st.integers(1, 100), max_size=20)


@given(UNITS, UNITS)
def test_units_change_places_within_the_larger_side(leaving, coming):
    held = sum(leaving)
    steps = list(exchange_order(leaving, coming))
    for way, index in steps:
        held += coming[index] if way == "in" else -leaving[index]
        assert held <= max(sum(leaving), sum(coming))
    assert [index for way, index in steps if way == "out"] == list(range(len(leaving)))
    assert [index for way, index in steps if way == "in"] == list(range(len(coming)))


def test_roles_stay_resident_where_there_is_room():
    assert choose_residency("full", "auto", free_bytes=100, role_bytes=50) == "all"
    assert choose_residency("full", "auto", free_bytes=100, role_bytes=51) == "one"
    assert choose_residency("full", "one", free_bytes=100, role_bytes=1) == "one"
    assert choose_residency("full", "all", free_bytes=100, role_bytes=99) == "all"
    assert choose_residency("hybrid", "all", free_bytes=100, role_bytes=1) == "beside", "counts in full only"
