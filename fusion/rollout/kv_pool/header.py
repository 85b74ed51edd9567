"""The format of a file of the KV pool: fixed fields, a JSON header, the payload. No pickle.

    | magic, 8 bytes | header bytes, u32 | xxh3 of the header, u64 | header (JSON) | KV | routing |

The header describes the payload and has its checksum. It repeats the name of the file, a digest of what the KV is of,
so that KV of other weights, tokens, ranks or hosts is not even found. A reader states what it expects and gets that or
an error; `PooledFile` is the one reader, of a file of this machine and of the bytes of one of another."""

import hashlib
import io
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod

import torch
from xxhash import xxh3_64, xxh3_64_intdigest

from fusion.inference.pooled import FoundKV, KVDamaged, KVKey

MAGIC = b"rlfuskv1"
PREAMBLE = struct.Struct("<8sIQ")
MAX_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class Header:
    """``rank``: that has written it; ``name``: of the file; ``computed``: leading tokens whose KV is in the file;
    ``kv_bytes``: of the blocks of all layers; ``routing``: shape [computed, layers, k] and the bytes of an element, ()
    for none; ``sum``: xxh3 of the payload."""

    rank: int
    name: str
    computed: int
    kv_bytes: int
    routing: tuple[int, ...]
    sum: int

    def encode(self) -> bytes:
        text = json.dumps(asdict(self), separators=(",", ":")).encode()
        return PREAMBLE.pack(MAGIC, len(text), xxh3_64_intdigest(text)) + text

    @classmethod
    def read(cls, file: io.RawIOBase) -> "tuple[Header, int]":
        """Read what `encode` has written. Return it and the bytes of the file with this payload.
        Raise KVDamaged: it is not the header of a file of the pool."""
        preamble = file.read(PREAMBLE.size) or b""
        if len(preamble) < PREAMBLE.size:
            raise KVDamaged("the file is shorter than its preamble")
        magic, size, checksum = PREAMBLE.unpack(preamble)
        if magic != MAGIC or size > MAX_HEADER_BYTES:
            raise KVDamaged("not a file of the KV pool")
        text = file.read(size) or b""
        if xxh3_64_intdigest(text) != checksum:
            raise KVDamaged("the header's checksum differs")
        try:
            fields = json.loads(text)
            header = cls(**fields | {"routing": tuple(fields["routing"])})
        except (ValueError, TypeError, KeyError) as error:
            raise KVDamaged(f"not a header: {error}") from None
        numbers = (header.rank, header.computed, header.kv_bytes, header.sum, *header.routing)
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise KVDamaged("a number of the header is none")
        routing_bytes = prod(header.routing) if header.routing else 0
        return header, PREAMBLE.size + size + header.kv_bytes + routing_bytes


class PooledFile(FoundKV):
    """The content of a file whose header is verified. It closes ``file``, also after an error.
    ``file``: the content from its beginning, of ``nbytes``.
    ``name``: of the file with the KV of ``key``.
    Raise KVDamaged: it is not that file."""

    def __init__(self, file: io.RawIOBase, nbytes: int, *, key: KVKey, name: str, own: bool = False):
        self._file, self.own = file, own
        try:
            header, expected_bytes = Header.read(file)
            if header.name != name:
                raise KVDamaged("of another shard, request, version, prefix or length")
            if not 0 < header.computed < key.num_tokens:
                raise KVDamaged(f"it has {header.computed} of {key.num_tokens} tokens")
            if expected_bytes != nbytes:
                raise KVDamaged(f"it has {nbytes} bytes, not {expected_bytes}")
        except BaseException:
            file.close()
            raise
        self._sum = header.sum
        self.computed, self.kv_bytes, self.routing = header.computed, header.kv_bytes, header.routing

    def read(self, kv: torch.Tensor, routing: torch.Tensor | None) -> None:
        """Read the payload and verify it, as `FoundKV.read`."""
        parts = [bytes_of(part) for part in (kv, routing) if part is not None]
        try:
            for part in parts:
                while part.nbytes:
                    count = self._file.readinto(part)
                    if not count:
                        raise KVDamaged(f"the file ends {part.nbytes} bytes early")
                    part = part[count:]
        except OSError as error:
            raise KVDamaged(str(error)) from None
        if payload_sum(parts) != self._sum:
            raise KVDamaged("the payload's checksum differs")

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class FileNames:
    """Names of the files of a run on one host, by the boot of that."""

    run: str
    boot: str

    def file(self, key: KVKey) -> str:
        """Return the name of the file of a rank's KV of a request: only ranks of one run and host with the same part
        of the same layers have it in common."""
        shard = f"{self.run} {self.boot} {key.shard}"
        facts = [MAGIC.decode(), shard, key.request, key.version, key.prefix, key.num_tokens]
        return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def payload_sum(parts: Sequence[memoryview]) -> int:
    """Return the checksum of a payload that consists of these parts."""
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the host."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data
