"""Damage a file beside the checkpoint between two starts: flip a bit in it, or cut it; and judge what a resume says.

Only rows that the newest checkpoint seals are damaged in a log: a resume cuts the others. Pure but for `strike`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from fusion.telemetry.manifest import read_manifest
from fusion.telemetry.run_contents import BEST, LOGS, complete_checkpoints

NOT_NAMED = (BEST, "timeline.json")
"""Files that are written again or only drawn: a resume goes on whatever they hold, and need not name them"""
BESIDE = (*LOGS, "loggers.json", *NOT_NAMED)


@dataclass(frozen=True)
class Flip:
    """A file that was damaged. ``whole``: its sealed bytes before."""

    name: str
    whole: bytes

    def dropped_rows(self, output: str) -> list[dict[str, Any]] | None:
        """Return the rows that a resume says to have dropped, by what it printed; None: it has not named the file."""
        if self.name in NOT_NAMED:
            return []
        name = re.escape(self.name)
        found = re.search(rf"\b{name}(?:: damaged rows were dropped \(([\d, -]+)\)| is (?:damaged|missing))", output)
        if found is None:
            return None
        spans = [[int(number) for number in span.split("-")] for span in (found[1] or "").split(", ") if span]
        rows = self.whole.splitlines()
        return [json.loads(row) for span in spans for row in rows[span[0] - 1 : span[-1]]]


def damaged(data: bytes, position: int, bit: int | None) -> bytes:
    """Return the bytes with one bit flipped, or cut before a position where ``bit`` is None."""
    flipped = b"" if bit is None else bytes([data[position] ^ 1 << bit]) + data[position + 1 :]
    return data[:position] + flipped


def strike(folder: Path, random: Random) -> Flip | None:
    """Damage one of the files of a run that has ended; None: it has no checkpoint, from which it would resume."""
    if not (complete := [*complete_checkpoints(folder).values()]):
        return None
    ends = {name: seal.blocks[-1].end for name, seal in read_manifest(complete[-1]).seals.items() if seal.blocks}
    contents = {name: (folder / name).read_bytes() for name in BESIDE if (folder / name).exists()}
    sizes = {name: ends.get(name, 0) if name in LOGS else len(content) for name, content in contents.items()}
    name = random.choice(sorted(name for name, size in sizes.items() if size))
    bit = random.choice((None, *range(8)))
    (folder / name).write_bytes(damaged(contents[name], random.randrange(sizes[name]), bit))
    return Flip(name, contents[name][: sizes[name]])


def with_dropped(
    rows: Iterable[Mapping[str, Any]], dropped: Iterable[Mapping[str, Any]], key: str
) -> Sequence[Mapping[str, Any]]:
    """Return the rows of a log by their steps, with those that resumes dropped and that no later row replaces."""
    kept = [*rows]
    names = {row[key] for row in kept}
    return sorted([*kept, *(row for row in dropped if row[key] not in names)], key=lambda row: row["step"])
