"""Keep the history of prompts in a checkpoint: one file for each attention rank that drafts.

    drafts/rank-00003.bin   what the next group of each prompt would have as history, as `pieces.encode`, compressed

Version 2 has the requests that generated it, and their rewards as far as they are known; version 1 had neither, and its
responses weigh alike.
The manifest of the checkpoint has size and digest of each file, and is checked before any of them is read."""

from collections.abc import Sequence
from pathlib import Path

from fusion.rollout.drafts.pieces import TextPiece, compress, decode, decompress, encode
from fusion.telemetry.files import sync
from fusion.telemetry.manifest import FileWriter

MAX_TOKENS = 1 << 24
"""Maximum of a file, 64 MiB. Of more, the history of the prompts used last is kept."""
VERSION = 2


def write_history(folder: Path, rank: int, pieces: Sequence[TextPiece]) -> None:
    """Write the file of a rank, which does not exist, to disk; raise OSError if that fails."""
    folder.mkdir(exist_ok=True)
    file = FileWriter(folder / f"rank-{rank:05d}.bin")
    try:
        file.write(compress(encode({"version": VERSION}, pieces)))
        file.close()
    finally:
        file.abort()
    sync(folder)


def read_history(folder: Path) -> list[TextPiece]:
    """Return the history in all files of a folder; [] if there is none. Of what several have of a prompt, the longest.
    Raise ValueError if a file is damaged; names it."""
    longest: dict[bytes, list[TextPiece]] = {}
    for path in sorted(folder.glob("rank-*.bin")):
        try:
            header, pieces = decode(decompress(path.read_bytes()))
            if (version := header.get("version", 1)) not in (1, VERSION):
                raise ValueError(f"version {version!r:.20} of the history; this code reads up to {VERSION}")
            if not all(type(name) is str for piece in pieces for name in (piece.group, piece.request)):
                raise ValueError("the name of a group or request is not text")
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        own: dict[bytes, list[TextPiece]] = {}
        for piece in pieces:
            own.setdefault(piece.prompt, []).append(piece)
        for prompt, texts in own.items():
            if _num_tokens(texts) > _num_tokens(longest.get(prompt, [])):
                longest[prompt] = texts
    return [piece for texts in longest.values() for piece in texts]


def _num_tokens(pieces: Sequence[TextPiece]) -> int:
    return sum(len(piece.tokens) for piece in pieces)
