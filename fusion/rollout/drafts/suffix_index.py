"""Predict the next tokens of a sequence from where its last tokens occurred before, in responses to one prompt.

An index holds the prompt and any number of sequences that begin with it: the responses of a group, and earlier
rollouts of the same prompt. `draft` returns the tokens that followed the last `min_match` to `max_match` tokens of a
sequence elsewhere in the index, as a tree: `max_children` = 1 is a single path, as in SuffixDecoding (arXiv
2411.04975); more are the beams of Seer's grouped speculation (arXiv 2511.14617, section 3.4). Nodes come most probable
first, so that any beginning of a draft is the best tree of its size.

The share of a token: occurrences of the text before it followed by the token over those followed by anything, the
longer text counting more (`suffix_index.cpp`). Sequences count with their weight; one of weight 0 only reads. The
caller states how often a token of a share is right (`acceptance`); the probability of a node is the product along its
path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

SIBLING, HISTORY = 0, 1
"""Sources of a sequence: a response of the same group; a rollout of an earlier epoch"""


@dataclass(frozen=True)
class Drafts:
    """Drafts of n sequences, concatenated; draft i is ``offsets[i]:offsets[i + 1]``.

    ``tokens`` int32 [m]; ``parents`` int32 [m]: index within the draft of the node before, -1: the sequence itself;
    ``shares``, ``probabilities`` float64 [m]: of the token, and of the path to it; ``sources`` uint8 [m]: where the
    token mostly occurred.
    """

    offsets: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    shares: np.ndarray
    probabilities: np.ndarray
    sources: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, i: int) -> slice:
        """Return where draft ``i`` lies in the columns."""
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))


class SuffixIndexes(Protocol):
    """Indexes by number. Calls are for many sequences at once, as a call costs more than a draft. Not thread-safe."""

    def new(self, prompt: Sequence[int], min_match: int, max_match: int) -> int:
        """Create an index of a prompt. ``min_match``: tokens of a sequence that must occur elsewhere for a draft;
        ``max_match``: that are compared."""

    def open(self, index: int, source: int, weight: int = 1) -> int:
        """Begin a sequence behind the prompt; return its number in the index."""

    def extend(self, places: Sequence[tuple[int, int]], texts: Sequence[Sequence[int]]) -> None:
        """Append ``texts[i]`` to sequence ``places[i]``: (index, sequence)."""

    def draft(
        self,
        places: Sequence[tuple[int, int]],
        max_depth: Sequence[int],
        max_nodes: Sequence[int],
        acceptance: np.ndarray,
        max_children: int = 1,
        min_probability: float = 0.0,
    ) -> Drafts:
        """Draft at most ``max_nodes[i]`` tokens behind sequence ``places[i]``, none further than ``max_depth[i]`` from
        it or less probable than ``min_probability``, with at most ``max_children`` behind a token. ``acceptance``
        float64 [bins]: by share, in bins of 0 to 1."""

    def remove(self, index: int) -> None:
        """Free an index."""

    def nbytes_of(self, index: int) -> int:
        """Return the bytes of an index."""

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes."""
