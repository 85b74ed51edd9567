"""The format of a file of the KV pool: fixed fields, a JSON header, the payload. Pure bytes; no pickle.

    | magic, 8 bytes | header bytes, u32 | xxh3 of the header, u64 | header (JSON) | KV | routing |

The header describes the payload and has its checksum; a reader states what it expects and gets that or an error.
The name of a file is a digest of the same facts, so that KV of other weights, tokens, ranks or hosts is not even found.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from xxhash import xxh3_64, xxh3_64_intdigest

from fusion.inference.pooled import KVDamaged, KVKey

MAGIC = b"rlfuskv1"
PREAMBLE = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Header:
    """``rank``: that has written it; ``shard``: the run, the host, and which part of which layers a rank holds;
    ``computed``: leading tokens whose KV is in the file; ``kv_bytes``: of the blocks of all layers; ``routing``: shape
    [computed, layers, k] and the bytes of an element, () for none; ``sum``: xxh3 of the payload."""

    rank: int
    shard: str
    request: str
    version: int
    prefix: str
    num_tokens: int
    computed: int
    kv_bytes: int
    routing: tuple[int, ...]
    sum: int

    def encode(self) -> bytes:
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return PREAMBLE.pack(MAGIC, len(text), xxh3_64_intdigest(text)) + text

    @property
    def routing_bytes(self) -> int:
        product = 1
        for extent in self.routing:
            product *= extent
        return product if self.routing else 0

    @classmethod
    def decode(cls, preamble: bytes, text: bytes) -> Header:
        """Decode what `encode` has written; ``text``: the rest, of `header_bytes` bytes.

        Raises:
            KVDamaged: the checksum differs, or it is no header.
        """
        _, _, checksum = PREAMBLE.unpack(preamble)
        if xxh3_64_intdigest(text) != checksum:
            raise KVDamaged("the header's checksum differs")
        try:
            fields = json.loads(text)
            header = cls(**fields | {"routing": tuple(fields["routing"])})
        except (ValueError, TypeError, KeyError) as error:
            raise KVDamaged(f"not a header: {error}") from None
        numbers = (
            header.rank,
            header.version,
            header.num_tokens,
            header.computed,
            header.kv_bytes,
            header.sum,
            *header.routing,
        )
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise KVDamaged("a number of the header is none")
        return header

    def check(self, *, shard: str, key: KVKey, file_bytes: int, header_bytes: int) -> None:
        """Verify that this is the header of that rank's KV of that request, in a file of that size.

        Raises:
            KVDamaged: it is not.
        """
        expected = (shard, key.request, key.version, key.prefix, key.num_tokens)
        found = (self.shard, self.request, self.version, self.prefix, self.num_tokens)
        if found != expected:
            names = ("shard", "request", "version", "prefix", "num_tokens")
            wrong = [name for name, one, other in zip(names, found, expected, strict=True) if one != other]
            raise KVDamaged(f"of another {', '.join(wrong)}")
        if not 0 < self.computed < self.num_tokens:
            raise KVDamaged(f"it has {self.computed} of {self.num_tokens} tokens")
        if header_bytes + self.kv_bytes + self.routing_bytes != file_bytes:
            raise KVDamaged(f"it has {file_bytes} bytes, not {header_bytes + self.kv_bytes + self.routing_bytes}")


def header_bytes(preamble: bytes) -> int:
    """Return the bytes of the JSON header behind a preamble.

    Raises:
        KVDamaged: it is not the preamble of a file of the pool.
    """
    if len(preamble) < PREAMBLE.size:
        raise KVDamaged("the file is shorter than its preamble")
    magic, size, _ = PREAMBLE.unpack(preamble)
    if magic != MAGIC or size > MAX_HEADER_BYTES:
        raise KVDamaged("not a file of the KV pool")
    return size


@dataclass(frozen=True)
class FileNames:
    """Names of the files of a run on one host, by the boot of that."""

    run: str
    boot: str

    def shard(self, key: KVKey) -> str:
        """Return what only ranks of one run and host with the same part of the same layers have in common."""
        return f"{self.run} {self.boot} {key.shard}"

    def file(self, key: KVKey) -> str:
        """Return the name of the file of a rank's KV of a request."""
        facts = [MAGIC.decode(), self.shard(key), key.request, key.version, key.prefix, key.num_tokens]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def payload_sum(parts: Sequence[memoryview]) -> int:
    """Return the checksum of a payload that consists of these parts."""
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()
