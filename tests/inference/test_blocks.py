from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusion.inference.blocks import BlockManager, next_name, root_name

SIZE = 2


class Blocks(RuleBasedStateMachine):
    """Sequences of a tiny vocabulary take, name, share and release blocks, against a model of what each block holds."""

    def __init__(self):
        super().__init__()
        self.version = 0
        self.manager = BlockManager(6, SIZE)
        self.holders: list[list[int]] = []
        self.content: dict[int, tuple] = {}  # named block → (version, all tokens up to its end)

    @staticmethod
    def names(version, tokens):
        name, made = root_name(version), []
        for i in range(0, len(tokens) - SIZE + 1, SIZE):
            name = next_name(name, tokens[i : i + SIZE])
            made.append(name)
        return made

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8), full=st.integers(0, 4))
    def begin(self, tokens, full):
        names = self.names(self.version, tokens)
        hits = self.manager.find(names)
        for i, block in enumerate(hits):
            assert self.content[block] == (self.version, tuple(tokens[: (i + 1) * SIZE]))
        wanted = -(-len(tokens) // SIZE) - len(hits)
        if wanted + self.manager.idle(hits) > self.manager.available:
            return
        self.manager.share(hits)
        blocks = hits + self.manager.take(wanted)
        for i in range(len(hits), min(full, len(names))):
            taken = names[i] in self.manager._names
            self.manager.name(blocks[i], names[i])
            self.content.pop(blocks[i], None)
            if not taken:
                self.content[blocks[i]] = (self.version, tuple(tokens[: (i + 1) * SIZE]))
        self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def end(self, data):
        self.manager.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @rule()
    def new_version(self):
        self.version += 1
        self.manager.forget()
        assert not self.manager._cached

    @invariant()
    def nothing_is_lost_or_held_twice(self):
        references = Counter(block for blocks in self.holders for block in blocks)
        released, never_taken = self.manager._free, range(self.manager.highest + 1, 6)
        free, cached = {*released, *never_taken}, set(self.manager._cached)
        assert len(free) == len(released) + len(never_taken)
        assert not free & cached and not (free | cached) & set(references)
        assert free | cached | set(references) == set(range(6))
        assert self.manager.available == len(free) + len(cached)
        assert [references[b] for b in range(self.manager.highest + 1)] == self.manager._references
        named = [b for b, name in enumerate(self.manager._names) if name is not None]
        assert not set(named) & free and cached <= set(named)
        assert {self.manager._names[b]: b for b in named} == self.manager._by_name


Blocks.TestCase.settings = settings(max_examples=150, stateful_step_count=25)
test_blocks_are_never_lost_shared_wrongly_or_found_under_another_version = Blocks.TestCase


@given(st.lists(st.integers(0, 3), max_size=12))
def test_blocks_are_taken_from_a_stack_of_all_of_them(counts):
    """A count takes so many blocks; 0 releases those taken last."""
    manager, stack, held = BlockManager(9, SIZE), list(range(8, -1, -1)), []
    for count in counts:
        if not count and held:
            blocks = held.pop()
            manager.release(blocks)
            stack += reversed(blocks)
        elif count <= len(stack):
            held.append(manager.take(count))
            assert held[-1] == [stack.pop() for _ in range(count)]
        assert manager.available == len(stack)


def test_names_bind_version_and_prefix_and_are_the_same_in_every_process():
    assert len({root_name(version) for version in range(-1, 50)}) == 51
    assert next_name(root_name(0), (1, 2)) != next_name(root_name(0), (2, 1))
    assert next_name(next_name(root_name(0), (1, 2)), (3, 4)) != next_name(root_name(0), (3, 4))
    assert next_name(root_name(3), (1, 2)).hex() == "7ef74ded7dcf670c1538413f3b4fbf58"


def test_least_recently_used_prefix_is_evicted_from_its_end():
    manager = BlockManager(4, SIZE)
    chains = [Blocks.names(0, tokens) for tokens in ((1, 1, 1, 1), (2, 2, 2, 2))]
    for names in chains:
        blocks = manager.take(2)
        for block, name in zip(blocks, names, strict=True):
            manager.name(block, name)
        manager.release(blocks)
    manager.take(1)
    assert [len(manager.find(names)) for names in chains] == [1, 2]
    manager.take(1)
    assert [len(manager.find(names)) for names in chains] == [0, 2]


def test_a_second_release_is_a_broken_invariant():
    manager = BlockManager(2, SIZE)
    blocks = manager.take(1)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        manager.release(blocks)
    with pytest.raises(AssertionError, match="available"):
        manager.take(3)
