"""The index of names against a dict; what ended lately against a list, and its memory."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue.samples.endings import Endings, marks_of
from distqueue.samples.names import NameTable

NAMES = st.lists(st.sampled_from(["", "a", "日本", "é" * 99, *map(str, range(20))]), unique=True, max_size=16)


@settings(max_examples=60)
@given(data=st.data())
def test_index_against_dict(data: st.DataObject) -> None:
    index, model = NameTable(), {}
    for _ in range(data.draw(st.integers(1, 12))):
        names = data.draw(NAMES)
        if data.draw(st.booleans()):
            new = [name for name in names if name not in model]
            free = [slot for slot in range(100) if slot not in model.values()]
            slots = data.draw(st.permutations(free[: 2 * len(new)]))[: len(new)]
            index.insert(new, np.array(slots, np.int64))
            model |= dict(zip(new, slots, strict=True))
        else:
            gone = [name for name in names if name in model]
            slots = np.array([model.pop(name) for name in gone], np.int64)
            assert index.remove(slots) == tuple(gone)
        assert index.find(names).tolist() == [model.get(name, -1) for name in names]
        assert index.of(np.array(list(model.values()), np.int64)) == tuple(model)


def arrays_of(endings: Endings) -> list[np.ndarray]:
    return [endings._marks, endings._how, endings._order]


def test_endings_take_their_memory_at_the_start() -> None:
    endings = Endings(remembered=5000)
    sizes, num_new = [[array.nbytes for array in arrays_of(endings)]], 0
    for first in range(0, 20_000, 100):
        endings.add([f"prompt-{first + k:06}/3" for k in range(100)], "done")
        sizes.append([array.nbytes for array in arrays_of(endings)])
        num_new = max(num_new, len(endings._new))
    assert all(size == sizes[0] for size in sizes)
    assert sum(sizes[0]) == 20 * 5000 and num_new <= 5000 // 32


@settings(max_examples=60)
@given(
    batches=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["done", "dropped:stale"])), max_size=12),
    remembered=st.sampled_from([1, 5, 40, 64]),
)
def test_the_last_endings_are_remembered(batches: list[tuple[int, str]], remembered: int) -> None:
    endings, ended = Endings(remembered), []
    for count, reason in batches:
        ids = [f"s{len(ended) + k}" for k in range(count)]
        endings.add(ids, reason)
        ended += [(id, reason) for id in ids]
        codes = endings.find([id for id, _ in ended]).tolist()
        known = [(id, endings.reason(code)) for (id, _), code in zip(ended, codes, strict=True) if code != -1]
        assert known == ended[len(ended) - len(known) :]
        assert min(remembered, len(ended)) <= len(known) <= remembered + remembered // 32
        marks, how = endings.recent()
        assert marks.tolist() == marks_of([id for id, _ in known]).tolist()
        assert [endings.reason(code) for code in how.tolist()] == [reason for _, reason in known]
    assert endings.counts.total() == len(ended)
    assert (endings.find(["never", *"abc"]) == -1).all()
