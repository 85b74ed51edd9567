"""Plan how a draft is verified in one forward pass, and which of its tokens are kept. Pure.

    draft (a tree)  ─ Verification ─►  rows: the sequence's last token, then the draft's, path by path
                                         │ forward; every row samples the token behind it, with its own noise
    sampled tokens  ─ follow ─────────►  the path along which every sampled token is the draft's next one is kept,
                                         and the token that was sampled at its end

Every token that is kept was sampled from the model with the noise of its position, so drafts change only how many
tokens a forward pass yields: stronger than speculative sampling (Leviathan et al., arXiv 2211.17192), which keeps only
the distribution.

A path from the sequence to a leaf has KV blocks of its own from the block that is not full on, and each row's KV goes
to every path through it. So a row attends over a path as any token attends over its sequence: no mask of the tree,
results to the bit as without a draft, and to keep a path is to take over its blocks.

    blocks    [ full ][ full ][ part ][      ]          tails[0]: the sequence's own blocks
                              [ part ][      ]          tails[1]: `part` is copied, its rows are written again
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fusion.inference.blocks import BlockManager

if TYPE_CHECKING:
    from fusion.inference.sequence import Blocks, Sequence


class Draft(NamedTuple):
    """Tokens that may follow a sequence. ``parents``: index of the token before each, smaller than its own; -1: the
    sequence's last token. No two tokens with one parent are equal."""

    tokens: Items[int]
    parents: Items[int]


class Drafter(Protocol):
    """Propose drafts, the same on every rank with the same schedule: what it returns may depend only on its calls."""

    def draft(self, sequences: Items[Sequence], max_depth: Items[int], max_tokens: int) -> list[Draft | None]:
        """Return a draft for each sequence, or None. ``max_depth``: number of tokens behind sequence i that may be
        used; deeper ones would be dropped. ``max_tokens``: of all drafts together."""

    def adopt(self, version: int) -> None:
        """Record that the engine's policy is of another version from now on."""

    def drafts_update(self) -> bytes:
        """Return what has arrived for the drafters of all ranks with this schedule, to be read by each at this step;
        b"": nothing. Called at every step, on the first of these ranks."""

    def read(self, drafts_update: bytes) -> None:
        """Read what `drafts_update` has returned on the first rank of the schedule, at the same step on every rank."""

    def observe(self, verified: Items[tuple[Verification, Items[int]]]) -> None:
        """Record which rows of each draft of a step were kept."""

    def end(self, seq: Sequence) -> None:
        """Record the last tokens of a sequence that leaves the engine, for whatever reason."""


def max_depths(sequences: Items[Sequence]) -> list[int]:
    """Return the depth of the draft that each sequence has room for."""
    return [seq.limit - len(seq.tokens) - 1 for seq in sequences]


class Path(NamedTuple):
    """Consecutive rows of a verification, one behind the other: rows ``start:stop``, on path ``number``."""

    number: int
    start: int
    stop: int


@dataclass(frozen=True, eq=False)
class Verification:
    """The rows of one sequence with a draft. Row 0 is the sequence's last token; a row comes after its parent, and
    rows of one path that are not on an earlier one are consecutive.

    ``tokens``, ``parents``, ``depths``: of each row; ``rows``: the row of each token of the draft; ``paths``: the rows
    that each path adds; ``shared``: the rows before them on the path, by path; ``first``: the block of the sequence in
    which row 0 is; ``tails``: blocks of each path from there on, filled by the scheduler."""

    seq: Sequence
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    rows: list[int]
    paths: list[Path]
    shared: list[list[int]]
    first: int
    tails: list[Blocks]

    @classmethod
    def of(cls, seq: Sequence, draft: Draft, block_size: int) -> Verification:
        """Plan the rows of a draft that is not empty."""
        count, first = len(draft.tokens), (len(seq.tokens) - 1) // block_size
        children: list[list[int]] = [[] for _ in range(count + 1)]
        for node in reversed(range(count)):
            children[draft.parents[node]].append(node)  # those of the sequence itself are the last
        tokens, parents, depths = [seq.tokens[-1]], [-1], [0]
        rows = [0] * (count + 1)  # the last: the sequence's
        paths: list[Path] = []
        shared: list[list[int]] = []
        start = 0
        left = children[-1]
        while left:  # depth first, a node's first child first
            node = left.pop()
            parent, row = rows[draft.parents[node]], len(tokens)
            rows[node] = row
            tokens.append(draft.tokens[node])
            parents.append(parent)
            depths.append(depths[parent] + 1)
            left += children[node]
            if not children[node]:
                paths.append(Path(len(paths), start, row + 1))
                shared.append(_ancestors(parents, start))
                start = row + 1
        return cls(seq, tokens, parents, depths, rows=rows[:-1], paths=paths, shared=shared, first=first, tails=[])

    def __len__(self) -> int:
        return len(self.tokens)

    def blocks_of_tail(self, path: int, block_size: int) -> int:
        """Number of blocks of a path's tail."""
        last = len(self.seq.tokens) - 1 + self.depths[self.paths[path].stop - 1]
        return last // block_size + 1 - self.first

    def table(self, path: int) -> Blocks:
        return self.seq.blocks[: self.first] + self.tails[path]

    def copies(self, block_size: int) -> list[tuple[int, int]]:
        """Return (from, to): blocks whose content the other paths share with the first, before this step."""
        if (len(self.seq.tokens) - 1) % block_size == 0:
            return []
        return [(self.tails[0][0], tail[0]) for tail in self.tails[1:]]

    def follow(self, sampled: Items[int]) -> list[int]:
        """Return the rows that are kept, from row 0 on, each the child of the one before that holds the token sampled
        behind it."""
        kept = [0]
        for row in range(1, len(self)):  # parents come first
            if self.parents[row] == kept[-1] and self.tokens[row] == sampled[kept[-1]]:
                kept.append(row)
        return kept

    def path_of(self, row: int) -> int:
        """Return a path through a row: the one that adds it."""
        return next(path.number for path in self.paths if path.start <= row < path.stop)


def plan_verifications(
    decodes: Items[Sequence], drafter: Drafter, blocks: BlockManager, max_tokens: int
) -> list[Verification]:
    """Plan the verification of drafts of sequences that decode, as far as tokens and free blocks allow, and take the
    blocks: a draft preempts no sequence, but may evict cached prefixes as any other token may."""
    size = blocks.block_size
    drafts = drafter.draft(decodes, max_depths(decodes), max_tokens)
    verified: list[Verification] = []
    if not any(drafts):
        return verified
    for seq, draft in zip(decodes, drafts, strict=True):
        if draft is None or not draft.tokens or len(draft.tokens) > max_tokens:
            continue
        one = Verification.of(seq, draft, size)
        held = len(seq.blocks) - one.first
        sizes = [one.blocks_of_tail(path.number, size) for path in one.paths]
        if sum(sizes) - held > blocks.available:
            continue
        seq.blocks.extend(blocks.take(sizes[0] - held))
        one.tails.append(seq.blocks[one.first :])
        one.tails.extend(array("q", blocks.take(count)) for count in sizes[1:])
        max_tokens -= len(draft.tokens)
        verified.append(one)
    return verified


def _ancestors(parents: list[int], row: int) -> list[int]:
    """Return the rows before ``row`` on its path, from row 0 on."""
    before = []
    while (row := parents[row]) >= 0:
        before.append(row)
    return before[::-1]
