"""The groups of `fusion/ep_switch/connected.py`."""

from hypothesis import given
from hypothesis import strategies as st

from fusion.ep_switch.connected import connected

LINKS = st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), max_size=6)


@given(LINKS)
def test_numbers_are_in_one_group_exactly_if_links_connect_them(links):
    groups = connected(8, links)
    assert sorted(index for group in groups for index in group) == list(range(8))
    assert groups == sorted(tuple(sorted(group)) for group in groups)
    for group in groups:
        reached = {group[0]}
        for _ in group:
            reached |= {index for link in links if reached & {*link} for index in link}
        assert reached == {*group}
