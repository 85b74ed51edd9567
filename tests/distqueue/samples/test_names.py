"""The name index against a dict, with hashes that collide; what ended lately against a list."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue.samples.endings import Endings
from distqueue.samples.names import HEAD_BYTES, MAX_FILL, NameIndex, Names

LONG = "é" * HEAD_BYTES
"""Names of this beginning differ only behind the bytes that lie in the array"""
NAMES = st.builds(
    lambda stem, k: f"{stem}{k}", st.sampled_from(["", "a", "日本", "a" * (HEAD_BYTES - 1), LONG]), st.integers(0, 30)
)
HASHES = {
    "python": hash,
    "by length": len,
    "one for all": lambda name: 7,
    "the last places": lambda name: -1 - len(name) % 3,
    "same low bits": lambda name: (hash(name) & 0xFF) << 16,
}


@settings(max_examples=150)
@given(data=st.data(), hash_name=st.sampled_from(sorted(HASHES)))
def test_index_against_dict(data: st.DataObject, hash_name: str) -> None:
    index, model = NameIndex(HASHES[hash_name]), {}
    for _ in range(data.draw(st.integers(1, 12))):
        texts = data.draw(st.lists(NAMES, unique=True, max_size=40))
        if data.draw(st.booleans()):
            new = [text for text in texts if text not in model]
            free = [slot for slot in range(400) if slot not in model.values()]
            slots = data.draw(st.permutations(free[: 2 * len(new)]))[: len(new)]
            index.insert(index.names(new), np.array(slots, np.int64))
            model |= dict(zip(new, slots, strict=True))
        else:
            gone = [text for text in texts if text in model]
            index.remove(np.array([model.pop(text) for text in gone], np.int64))
        assert index.find(index.names(texts)).tolist() == [model.get(text, -1) for text in texts]
        assert index.find(index.names(list(model))).tolist() == list(model.values())
        slots = np.array(list(model.values()), np.int64)
        assert index.texts(slots) == tuple(model) == index.at(slots).texts
        assert index.find(index.at(slots)).tolist() == list(model.values())
        assert len(index) == len(model)
        assert np.count_nonzero(index._buckets) == index._used + index._erased <= MAX_FILL * index._buckets.size


def test_index_holds_many_names_through_growth_and_reuse_of_slots() -> None:
    index = NameIndex()
    slots = np.arange(20_000)
    first = index.names([f"sample-{n}" for n in range(20_000)])
    index.insert(first, slots)
    index.remove(slots[::2])
    second = index.names([f"other-{n}" for n in range(10_000)])
    index.insert(second, slots[::2])
    assert (index.find(first)[::2] == -1).all() and (index.find(first)[1::2] == slots[1::2]).all()
    assert (index.find(second) == slots[::2]).all()


def test_a_name_with_a_nul_is_refused() -> None:
    with pytest.raises(ValueError, match=r"name 'a\\x00b': expected no NUL"):
        NameIndex().names(["fine", "a\0b"])


def test_endings_take_their_memory_at_the_start() -> None:
    endings, ids = Endings(remembered=5000), iter(range(12_000))
    sizes = []
    for _ in range(12):
        endings.add(endings._index.names([f"prompt-{next(ids):06}/3" for _ in range(1000)]), "done")
        arrays = (endings._how, *vars(endings._index).values())
        sizes.append([array.nbytes for array in arrays if isinstance(array, np.ndarray)])
    assert len(sizes[0]) == 4 and all(size == sizes[0] for size in sizes)


@settings(max_examples=60)
@given(batches=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["done", "dropped:stale"])), max_size=12))
def test_the_last_endings_are_remembered(batches: list[tuple[int, str]]) -> None:
    endings, ended = Endings(remembered=5), []
    for count, reason in batches:
        texts = [f"s{len(ended) + k}" for k in range(count)]
        endings.add(Names.of(texts), reason)
        ended += [(text, reason) for text in texts]
        codes = endings.find(endings._index.names([text for text, _ in ended])).tolist()
        known = [(text, endings.reason(code)) for (text, _), code in zip(ended, codes, strict=True) if code != -1]
        assert known == ended[-5:]
        assert list(zip(*endings.recent(), strict=True)) == ended[-5:]
        assert len(endings._index) == len(ended[-5:])
    assert endings.counts.total() == len(ended)
