"""A batch dealt out over readers: everything once, units whole, loads even."""

from hypothesis import given
from hypothesis import strategies as st

from distqueue.balance import split_by_tokens


@given(
    tokens=st.lists(st.integers(0, 1000), max_size=40),
    readers=st.integers(1, 9),
    size=st.integers(1, 4),
    grouped=st.booleans(),
)
def test_every_sample_goes_to_one_reader_and_no_reader_is_more_than_a_unit_above_the_mean(
    tokens: list[int], readers: int, size: int, grouped: bool
) -> None:
    units = [str(row // size) for row in range(len(tokens))] if grouped else []
    shares = [rows.tolist() for rows in split_by_tokens(tokens, readers, units)]
    assert sorted(row for rows in shares for row in rows) == list(range(len(tokens)))
    assert all(rows == sorted(rows) for rows in shares), "in the order of the batch"
    names = units or list(range(len(tokens)))
    homes = {names[row]: reader for reader, rows in enumerate(shares) for row in rows}
    assert all(homes[names[row]] == reader for reader, rows in enumerate(shares) for row in rows), "units stay whole"
    weights = [sum(t for t, name in zip(tokens, names, strict=True) if name == unit) for unit in set(names)]
    loads = [sum(tokens[row] for row in rows) for rows in shares]
    assert max(loads) <= sum(tokens) / readers + max(weights, default=0)
    assert len(set(names)) < readers or all(shares), "nobody is idle while there are units"
