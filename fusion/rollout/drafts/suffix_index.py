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

The indexes are in C++ (`suffix_index.cpp`), called through ctypes: the library depends on no version of Python."""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from fusion.npu.compiler import BuildError, Library, build, compiler

SOURCE = Path(__file__).with_name("suffix_index.cpp")
FLAGS = ("-O3", "-fPIC", "-std=c++17", "-fvisibility=default")
LIBRARY = Library(
    "drafts",
    "rlfusion_drafts",
    {"suffix_index": SOURCE.read_text()},
    flags=FLAGS,
    includes=[SOURCE.parent],
    key=[SOURCE.with_name("phrases.h").read_bytes()],
)
SIBLING, HISTORY, PHRASES = 0, 1, 2
"""Sources of a drafted token: a response of the same group; a rollout of an earlier epoch; responses to any prompt"""


@dataclass(frozen=True)
class Drafts:
    """Drafts of n sequences, concatenated; draft i is ``offsets[i]:offsets[i + 1]``. ``tokens`` int32 [m]; ``parents``
    int32 [m]: index within the draft of the node before, -1: the sequence itself; ``shares``, ``probabilities`` float64
    [m]: of the token, and of the path to it; ``sources`` uint8 [m]: where the token mostly occurred."""

    offsets: np.ndarray
    tokens: np.ndarray
    parents: np.ndarray
    shares: np.ndarray
    probabilities: np.ndarray
    sources: np.ndarray

    def of(self, i: int) -> slice:
        return slice(int(self.offsets[i]), int(self.offsets[i + 1]))


def is_buildable() -> bool:
    """Whether this machine has the library or can build it."""
    return LIBRARY.path.exists() or compiler() is not None


def check_buildable(drafts: str) -> None:
    """Check that this machine has the library or can build it. ``drafts``: `rollout.drafts.source`. Raise ValueError if
    there is no compiler; names the key."""
    if not is_buildable():
        raise ValueError(
            f"rollout.drafts.source={drafts}: no C++ compiler found (install g++, or rollout.drafts.source=none)"
        )


@cache
def load() -> ctypes.CDLL:
    """Build the library if needed (2 s) and load it. Raise BuildError if it cannot be built or loaded."""
    path = build(LIBRARY)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:  # e.g. built for another system, and shared with this one
        raise BuildError(f"{path} cannot be loaded: {error}") from None
    library.suffix_index_new.restype = ctypes.c_void_p
    library.suffix_index_new.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_int64]
    library.suffix_index_delete.argtypes = [ctypes.c_void_p]
    library.suffix_index_open.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_bool]
    library.suffix_index_bytes.argtypes = [ctypes.c_void_p]
    library.suffix_index_bytes.restype = ctypes.c_int64
    library.suffix_index_extend.restype = ctypes.c_int64
    library.suffix_index_extend.argtypes = [ctypes.c_int64, *[ctypes.c_void_p] * 5]
    library.phrases_new.restype = ctypes.c_void_p
    library.phrases_new.argtypes = [ctypes.c_int64]
    library.phrases_delete.argtypes = library.phrases_bytes.argtypes = [ctypes.c_void_p]
    library.phrases_bytes.restype = ctypes.c_int64
    pointer, int32 = ctypes.c_void_p, ctypes.c_int32
    library.suffix_index_draft.argtypes = [
        ctypes.c_int64,
        *[pointer] * 5,
        int32,
        int32,
        ctypes.c_double,
        *[pointer] * 7,
    ]
    return library


class SuffixIndexes:
    """Indexes by number. Calls are for many sequences at once, as a call costs more than a draft. Not thread-safe.
    ``phrase_bytes``: of the phrases of all prompts, at most; 0: none are kept."""

    def __init__(self, phrase_bytes: int = 0) -> None:
        self._library = load()
        self._pointers: dict[int, int] = {}
        self._created = self._index_bytes = 0
        self._phrases = self._library.phrases_new(phrase_bytes) if phrase_bytes else None

    @property
    def nbytes(self) -> int:
        """Bytes of all indexes and of the phrases."""
        return self._index_bytes + (self._library.phrases_bytes(self._phrases) if self._phrases else 0)

    def new(self, prompt: Sequence[int], min_match: int, max_match: int) -> int:
        """Create an index of a prompt. ``min_match``: tokens of a sequence that must occur elsewhere for a draft;
        ``max_match``: that are compared."""
        tokens = np.asarray(prompt, np.int32)
        number, self._created = self._created, self._created + 1
        pointer = self._library.suffix_index_new(min_match, max_match, tokens.ctypes.data, len(tokens))
        self._pointers[number] = pointer
        self._index_bytes += self._library.suffix_index_bytes(pointer)
        return number

    def open(self, index: int, source: int, weight: int = 1, *, is_new: bool = True) -> int:
        """Begin a sequence behind the prompt; return its number in the index. ``is_new``: its tokens were not counted
        as phrases before."""
        return self._library.suffix_index_open(self._pointers[index], source, weight, is_new)

    def extend(self, places: Sequence[tuple[int, int]], texts: Sequence[Sequence[int]]) -> None:
        """Append ``texts[i]`` to sequence ``places[i]``: (index, sequence)."""
        tokens, offsets = array("i"), array("q", [0])
        for text in texts:
            tokens.extend(text)
            offsets.append(len(tokens))
        pointers, sequences = self._places(places)
        self._index_bytes += self._library.suffix_index_extend(
            len(places), *map(_address, (pointers, sequences, tokens, offsets)), self._phrases
        )

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
        pointers, sequences = self._places(places)
        depths, nodes, room = array("i", max_depth), array("i", max_nodes), sum(max_nodes)
        drafts = Drafts(
            offsets=np.empty(len(places) + 1, np.int64),
            tokens=np.empty(room, np.int32),
            parents=np.empty(room, np.int32),
            shares=np.empty(room, np.float64),
            probabilities=np.empty(room, np.float64),
            sources=np.empty(room, np.uint8),
        )
        columns = (drafts.tokens, drafts.parents, drafts.shares, drafts.probabilities, drafts.sources)
        acceptance = np.ascontiguousarray(acceptance, np.float64)
        self._library.suffix_index_draft(
            len(places),
            *map(_address, (pointers, sequences, depths, nodes)),
            self._phrases,
            max_children,
            len(acceptance),
            min_probability,
            *(column.ctypes.data for column in (acceptance, drafts.offsets, *columns)),
        )
        size = int(drafts.offsets[-1])
        return Drafts(drafts.offsets, *(column[:size] for column in columns))

    def remove(self, index: int) -> None:
        pointer = self._pointers.pop(index)
        self._index_bytes -= self._library.suffix_index_bytes(pointer)
        self._library.suffix_index_delete(pointer)

    def nbytes_of(self, index: int) -> int:
        return self._library.suffix_index_bytes(self._pointers[index])

    def __del__(self) -> None:
        for pointer in self._pointers.values():
            self._library.suffix_index_delete(pointer)
        if self._phrases:
            self._library.phrases_delete(self._phrases)

    def _places(self, places: Sequence[tuple[int, int]]) -> "tuple[array[int], array[int]]":
        return array("Q", [self._pointers[index] for index, _ in places]), array("i", [number for _, number in places])


def _address(values: "array[int]") -> int:
    return values.buffer_info()[0]
