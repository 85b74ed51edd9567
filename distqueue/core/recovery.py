"""The queue's durable state: snapshots and journal events of a core, and the core rebuilt from them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from distqueue.errors import LostSample
from distqueue.layout import ColumnLayout
from distqueue.messages import Put, array_to_names, pack, unpack
from distqueue.samples import SampleTable
from distqueue.segments import Segment

if TYPE_CHECKING:
    from distqueue.core.queue import QueueCore

SEGMENT_FIELDS = "number", "shard", "path", "nbytes", "size"


def snapshot(core: QueueCore, copied_to: Callable[[int], str] | None = None) -> bytes:
    """Serialize the durable state; leases and reservations are not part of it. `copied_to`: for a checkpoint, the path
    of each segment's copy by number; the copies belong to no shard."""
    live = core.ledger.live
    segments = [(s.number, s.shard, s.path, s.nbytes, s.size, s.spilled) for s in live]
    if copied_to is not None:
        segments = [(s.number, "", copied_to(s.number), s.nbytes, s.size, False) for s in live]
    fields = {
        "segments": segments,
        "layouts": {name: layout.fields for name, layout in core.layouts.items()},
        "sealed": core.sealed,
        "late": core.late,
        "committed": list(core.committed.items()),
        "lost": core.lost,
    }
    arrays = {f"table.{name}": value for name, value in core.table.snapshot().items()}
    texts = {name: value for name, value in arrays.items() if isinstance(value, str)}
    return pack(fields | {"texts": texts}, {name: a for name, a in arrays.items() if not isinstance(a, str)})


def outline(snapshot: bytes) -> tuple[tuple[str, ...], list[str]]:
    """Read (tasks, paths of the segments) of a snapshot without restoring a core."""
    fields, _ = unpack(snapshot)
    about = json.loads(fields["texts"]["table.about"])
    return tuple(about["tasks"]), [path for _, _, path, *_ in fields["segments"]]


def restore(cls: type[QueueCore], snapshot: bytes, lease_s: float, options: dict[str, Any]) -> QueueCore:
    """Rebuild the core that made the snapshot."""
    fields, arrays = unpack(snapshot)
    table = {name.removeprefix("table."): value for name, value in (arrays | fields["texts"]).items()}
    core = cls(SampleTable.restore(table, lease_s), **options)
    for number, shard, path, nbytes, size, spilled in fields["segments"]:
        segment = Segment(number=number, shard=shard, path=path, nbytes=nbytes, size=size, live=True, spilled=spilled)
        core.ledger.adopt(segment)
    core.layouts = {name: ColumnLayout.from_fields(name, layout) for name, layout in fields["layouts"].items()}
    core.writers.sealed, core.late = fields["sealed"], fields["late"]
    for (number, path), late in fields["committed"]:
        core.remember_put(number, path, tuple(late))
    core.lost = [LostSample(*sample) for sample in fields["lost"]]
    core.recovered = True
    return core


def put_event(segment: Segment, put: Put, now_s: float) -> bytes:
    """The journal's entry for a put: its metadata, without a claim, and the file that holds its payload."""
    fields = {name: getattr(segment, name) for name in SEGMENT_FIELDS}
    return pack(fields | {"now_s": now_s}, {"put": np.frombuffer(replace(put, claim="").to_bytes(), np.uint8)})


def replay(core: QueueCore, kind: str, body: bytes) -> None:
    """Apply an event that was passed to `record`."""
    fields, arrays = unpack(body)
    match kind:
        case "put":
            core.ledger.adopt(Segment(**{name: fields[name] for name in SEGMENT_FIELDS}, live=True))
            put = Put.from_bytes(arrays["put"].tobytes())
            core.apply_put(put, number=fields["number"], path=fields["path"], now_s=fields["now_s"])
        case "ack":
            ids = array_to_names(arrays["ids"], fields["count"])
            core.end(core.table.ack(fields["task"], ids, replayed=True), 0.0)
        case "drop":
            core.end(core.table.drop(array_to_names(arrays["ids"], fields["count"]), fields["reason"]), 0.0)
        case "move":
            core.ledger.moved(fields["number"], fields["shard"], fields["path"], spilled=fields["spilled"])
        case "lose":  # of an earlier version
            core.apply_lose(core.table.at(fields["numbers"]), fields["reason"], 0.0)
        case "lost":
            core.apply_lose(array_to_names(arrays["ids"], fields["count"]), fields["reason"], 0.0)
        case "seal":
            core.writers.sealed = True
        case _:
            raise AssertionError(f"journal event {kind!r}: unknown; was it written by another version?")
