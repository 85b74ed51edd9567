"""List the files of a folder with their sizes and digests, and find the one that is damaged.

    manifest.json   {"digest": …, "files": {"trainer/rank-00000.safetensors": {"bytes": 4096, "xxh3_128": "…"}, …},
                     "logs": …}

A checkpoint's manifest also has the seals of the logs that lie beside it (`row_digests.py`).
The manifest is written last and in a canonical form, with the digest of its own list, so that a change of any byte of
any file is found, in the manifest, too. The digest (xxh3, 128 bits) finds damage, not forgery; it is computed faster
than any disk reads. What a process writes it hashes in memory (`FileWriter`), so that no byte is read again; what
others have written is read and hashed by several threads."""

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from fusion.telemetry.files import naming_file, open_new, sync, write_all, write_atomic
from fusion.telemetry.row_digests import NO_SEALS, Seal

NAME = "manifest.json"
CHUNK_BYTES = 8 << 20
WRITE_BYTES = 64 << 20
"""Maximum size of a piece that is hashed and written as one."""


@dataclass(frozen=True)
class FileRecord:
    """Size and digest of one file. ``xxh3_128``: 32 hexadecimal digits."""

    nbytes: int
    xxh3_128: str

    @classmethod
    def of(cls, path: Path) -> "FileRecord":
        """Read a file. Raise OSError: it cannot be read, or is a symbolic link."""
        digest, nbytes = xxhash.xxh3_128(), 0
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        # Not larger than the file: each thread that has read keeps as much memory for later.
        view = memoryview(bytearray(min(CHUNK_BYTES, os.fstat(fd).st_size + 1)))
        with open(fd, "rb", buffering=0) as file:
            with naming_file(path, 0):
                while count := file.readinto(view):
                    digest.update(view[:count])
                    nbytes += count
        return cls(nbytes, digest.hexdigest())


class Manifest(NamedTuple):
    """The records of a folder's files by path, and the seals of the logs beside it by name: none, if an earlier version
    wrote the manifest."""

    files: dict[str, FileRecord]
    seals: dict[str, Seal]


class FileWriter:
    """Write a new file and hash what is written; `close` returns when it is on disk.
    ``total``: bytes that will be written, which the error of a full disk names; None: it names those of a piece.
    Raise OSError: the name is taken, or the disk is full."""

    def __init__(self, path: Path, total: int | None = None) -> None:
        self._path, self._total = path, total
        self._fd, self._digest, self._nbytes = open_new(path), xxhash.xxh3_128(), 0

    def write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        for start in range(0, len(view), WRITE_BYTES):
            piece = view[start : start + WRITE_BYTES]
            self._digest.update(piece)
            write_all(self._fd, piece, path=self._path, total=self._total)
        self._nbytes += len(view)

    def close(self) -> FileRecord:
        with naming_file(self._path, self._nbytes):
            os.fsync(self._fd)
        self.abort()
        return FileRecord(self._nbytes, self._digest.hexdigest())

    def abort(self) -> None:
        """Close the file without syncing it. No error if it was closed before."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def write_manifest(folder: Path, records: Mapping[str, FileRecord], seals: Mapping[str, Seal] = NO_SEALS) -> None:
    """Complete a folder whose other files are on disk: write the manifest, and sync it.
    ``records``: of files that were hashed when they were written, by path relative to ``folder``; all others below
    ``folder`` are read.
    ``seals``: of logs beside the folder, by name."""
    unread = [name for name in _files(folder) if name not in records]
    everything = dict(records) | dict(zip(unread, _read_all(folder, unread), strict=True))
    _write(folder, everything, seals)


def write_seals(folder: Path, seals: Mapping[str, Seal]) -> None:
    """Replace the seals of these logs in the manifest of a complete folder, atomically.
    Raise ValueError: the manifest is missing or damaged."""
    records, others = read_manifest(folder)
    _write(folder, records, {**others, **seals})


def _write(folder: Path, records: Mapping[str, FileRecord], seals: Mapping[str, Seal]) -> None:
    write_atomic(folder / NAME, _text(records, seals))
    sync(folder / NAME)
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raise ValueError: it is missing or damaged."""
    try:
        text = (folder / NAME).read_text(encoding="utf-8")
        content = json.loads(text)
        files, logs = content["files"], content.get("logs", {})
        records = {name: FileRecord(int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in files.items()}
        seals = {name: Seal.from_json(blocks) for name, blocks in logs.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{NAME} cannot be read ({type(error).__name__})") from None
    if text != _text(records, seals):
        raise ValueError(f"{NAME} does not match its own digest")
    return Manifest(records, seals)


def find_damage(folder: Path, names: Iterable[str] | None = None) -> str | None:
    """Read the files that the manifest lists; return which of them is wrong and how, None if all are as written.
    ``names``: only these files, by path; None: all."""
    try:
        records = read_manifest(folder).files
    except ValueError as error:
        return str(error)
    selected = sorted(records) if names is None else list(names)
    # Sizes first: they are known without reading anything.
    for name in selected:
        try:
            nbytes = os.lstat(folder / name).st_size
        except OSError as error:
            return f"{name} is missing ({error.strerror})"
        if nbytes != records[name].nbytes:
            return f"{name} has {nbytes} bytes instead of {records[name].nbytes}"
    try:
        for name, record in zip(selected, _read_all(folder, selected), strict=True):
            if record != records[name]:
                return f"{name} does not match its digest"
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


def _read_all(folder: Path, names: list[str]) -> list[FileRecord]:
    with ThreadPoolExecutor(max(1, min(len(names), os.cpu_count() or 1, 16))) as threads:
        return list(threads.map(lambda name: FileRecord.of(folder / name), names))


def _files(folder: Path) -> list[str]:
    """List all files below a folder except its own manifest, by path."""
    paths = (path for path in folder.rglob("*") if path.is_symlink() or path.is_file())
    return sorted(name for path in paths if (name := path.relative_to(folder).as_posix()) != NAME)


def _text(records: Mapping[str, FileRecord], seals: Mapping[str, Seal]) -> str:
    files: dict[str, Any] = {
        name: {"bytes": record.nbytes, "xxh3_128": record.xxh3_128} for name, record in sorted(records.items())
    }
    logs = {"logs": {name: seal.to_json() for name, seal in sorted(seals.items())}} if seals else {}
    digest = xxhash.xxh3_128_hexdigest(json.dumps([files, logs] if logs else files, sort_keys=True).encode())
    return json.dumps({"digest": digest, "files": files, **logs}, indent=1) + "\n"
