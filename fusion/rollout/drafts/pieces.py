"""Encode pieces of responses that engines send to each other: columns of plain data, then the tokens of all pieces.

    size of the JSON (uint32) │ JSON: header, prompts, groups, and a row for each piece │ tokens, 1 to 4 bytes each
                             (and a reward for each, if any is known)

Every length is checked against the others when a message is decoded; nothing in it is executed."""

import json
import math
import struct
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

MAX_MESSAGE = 1 << 28
"""Bytes of a message, at most"""


class TextPiece(NamedTuple):
    """Tokens of a response from position ``start`` on. ``prompt``: digest of its prompt; ``request``, ``group``: of the
    request that generates it; ``reward``: of the response, finite; None: not known."""

    prompt: bytes
    group: str
    request: str
    start: int
    tokens: "array[int]"
    reward: float | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def split(self, count: int) -> "tuple[TextPiece, TextPiece]":
        """Return the first ``count`` tokens, and what is behind them."""
        return self._replace(tokens=self.tokens[:count]), self._replace(
            start=self.start + count, tokens=self.tokens[count:]
        )


def encode(header: Mapping[str, Any], pieces: Sequence[TextPiece]) -> bytes:
    """Return a message. ``header``: plain JSON."""
    prompts, groups = _numbers(piece.prompt.hex() for piece in pieces), _numbers(piece.group for piece in pieces)
    rows = [[prompts[one.prompt.hex()], groups[one.group], one.request, one.start, len(one.tokens)] for one in pieces]
    tokens = np.concatenate([np.zeros(0, "<u4"), *(np.array(piece.tokens, "<u4") for piece in pieces)]).astype("<u4")
    width = max(1, (int(tokens.max(initial=0)).bit_length() + 7) // 8)
    columns = {"header": header, "prompts": [*prompts], "groups": [*groups], "rows": rows, "width": width}
    if any(piece.reward is not None for piece in pieces):
        columns["rewards"] = [piece.reward for piece in pieces]
    text = json.dumps(columns, separators=(",", ":")).encode()
    return struct.pack("<I", len(text)) + text + tokens.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


def decode(message: bytes) -> tuple[dict[str, Any], list[TextPiece]]:
    """Return header and pieces of a message. Raise ValueError if it is not one that `encode` has returned."""
    try:
        (size,) = struct.unpack_from("<I", message)
        columns, body = json.loads(message[4 : 4 + size]), message[4 + size :]
        header, rows, width = columns["header"], columns["rows"], columns["width"]
        prompts, groups = [bytes.fromhex(prompt) for prompt in columns["prompts"]], columns["groups"]
        counts = [row[4] for row in rows]
        if width not in (1, 2, 3, 4) or min(counts, default=0) < 0 or sum(counts) * width != len(body):
            raise ValueError(f"{len(body)} bytes of tokens, expected {sum(counts)} tokens of {width} bytes")
        padded = np.zeros((sum(counts), 4), np.uint8)
        padded[:, :width] = np.frombuffer(body, np.uint8).reshape(-1, width)
        flat = array("i")
        flat.frombytes(padded.tobytes())
        ends = np.cumsum(counts, dtype=np.int64).tolist()
        rewards = _rewards(columns.get("rewards", [None] * len(rows)), len(rows))
        pieces = [
            TextPiece(prompts[prompt], groups[group], request, start, flat[end - count : end], reward)
            for (prompt, group, request, start, count), end, reward in zip(rows, ends, rewards, strict=True)
        ]
        return header, pieces
    except (struct.error, KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"a message between drafters is malformed: {error}") from error


def compress(message: bytes) -> bytes:
    """Compress a message that leaves the process: names and digests take more than a few tokens do."""
    return zlib.compress(message, 1)


def decompress(data: bytes) -> bytes:
    """Undo `compress`. Raise ValueError if it is damaged, or of more than `MAX_MESSAGE` bytes."""
    opened = zlib.decompressobj()
    try:
        message = opened.decompress(data, MAX_MESSAGE)
    except zlib.error as error:
        raise ValueError(f"a message between drafters is damaged: {error}") from error
    if not opened.eof:
        raise ValueError(f"a message between drafters is cut off, or has more than {MAX_MESSAGE} bytes")
    return message


def _rewards(values: Any, count: int) -> list[float | None]:
    if type(values) is not list or len(values) != count:
        raise ValueError(f"rewards={values!r:.100}: expected a list of {count}")
    for value in values:
        if value is not None and not (type(value) is float and math.isfinite(value)):
            raise ValueError(f"a reward is {value!r:.100}: expected a finite float, or null")
    return values


def _numbers(names: Iterable[str]) -> dict[str, int]:
    return {name: number for number, name in enumerate(dict.fromkeys(names))}
