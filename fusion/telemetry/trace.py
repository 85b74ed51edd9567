"""Write `timeline.json`: spans as a Chrome trace, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

The file is one JSON object whose last bytes close it. An append overwrites those bytes with new events and the same
ending in one write, so the file is valid JSON at any time; `read_timeline` also reads one whose last write was
interrupted."""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from fusion.telemetry.files import open_temporary, write_all
from fusion.telemetry.timeline import Span, wall_ns

ENDING = b"\n]}\n"


class TimelineFile:
    """Append spans to a trace; an existing file is continued on its own time axis.

    `ts` of an event is microseconds since `otherData.origin_ns` (nanoseconds since the epoch); a card is a process of
    the trace, a lane a thread of it. Spans of one argument of `append` that begin together are written the longest
    first, as viewers nest them."""

    def __init__(self, path: Path | str, origin_ns: int | None = None) -> None:
        self.path = Path(path)
        known = _read(self.path) if self.path.exists() else None
        self.origin_ns = known[0] if known else wall_ns() if origin_ns is None else origin_ns
        self._ids: dict[tuple[str, str], tuple[int, int]] = {}
        head = {"displayTimeUnit": "ms", "otherData": {"origin_ns": self.origin_ns}}
        body = (json.dumps(head)[:-1] + ', "traceEvents": [').encode()
        # Written to a temporary file that replaces the old one: a crash in between leaves the old file intact.
        temporary, self._fd = open_temporary(self.path)
        try:
            write_all(self._fd, body + ENDING, 0, self.path)
            self._end, self._empty = len(body), True
            if known:
                self.append(known[1])
            os.replace(temporary, self.path)
        except BaseException:
            self.close()
            temporary.unlink(missing_ok=True)
            raise

    def append(self, *spans: Iterable[Span]) -> None:
        """Write spans and everything needed to read them, by one system call; those of each argument by their start.
        Raise OSError: they could not be written, for want of space for example; the file is as it was."""
        ids, events = dict(self._ids), list[dict[str, Any]]()
        sorted_spans = [sorted(map(Span._make, some), key=lambda span: (span.start_ns, -span.end_ns)) for some in spans]
        for span in chain.from_iterable(sorted_spans):
            pid, tid = self._ids_of(span, events)
            ts, dur = (span.start_ns - self.origin_ns) / 1000, (span.end_ns - span.start_ns) / 1000
            events.append(
                {"ph": "X", "name": span.name, "cat": span.kind, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
            )
        if not events:
            return
        lines = ",\n".join(json.dumps(event, ensure_ascii=False) for event in events)
        body = (("\n" if self._empty else ",\n") + lines).encode()
        try:
            write_all(self._fd, body + ENDING, self._end, self.path)
        except OSError:
            self._ids = ids  # what names them was not written either
            os.ftruncate(self._fd, self._end)
            with suppress(OSError):  # it is read without its ending, too
                write_all(self._fd, ENDING, self._end)
            raise
        self._end, self._empty = self._end + len(body), False

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _ids_of(self, span: Span, events: list[dict[str, Any]]) -> tuple[int, int]:
        """Return the numbers of the card and the lane; the events that name them are added when they are first seen."""
        key = (span.card, span.lane)
        if key not in self._ids:
            cards = {card: pid for (card, _), (pid, _) in self._ids.items()}
            pid = cards.get(span.card, len(cards) + 1)
            tid = 1 + sum(card == span.card for card, _ in self._ids)
            for name, value in (("process_name", span.card), ("thread_name", span.lane)):
                events.append({"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}})
            self._ids[key] = (pid, tid)
        return self._ids[key]


def read_timeline(path: Path | str) -> list[Span]:
    """Return the spans of a `timeline.json`, also of one whose last write was cut short.
    Raise ValueError: it was not written by this program; names the file."""
    return _read(Path(path))[1]


def _read(path: Path) -> tuple[int, list[Span]]:
    """Return the origin of a trace, in nanoseconds since the epoch, and its spans."""
    try:
        trace = _load(path.read_text(encoding="utf-8", errors="replace"))
        origin_ns = trace["otherData"]["origin_ns"]
        if not isinstance(origin_ns, int):
            raise TypeError(f"origin_ns={origin_ns!r}")
        return origin_ns, _spans(trace["traceEvents"], origin_ns)
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path}: expected a timeline written by this program ({what})") from None


def _load(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        pass
    # An event fills one line, so everything up to the last comma at a line's end is whole.
    lines = text.split("\n")
    for keep in range(len(lines), 0, -1):
        whole = "\n".join(lines[:keep]).rstrip().rstrip(",")
        try:
            return json.loads(whole + ENDING.decode())
        except ValueError:
            continue
    raise ValueError("no part of it is JSON")


def _spans(events: Iterable[dict[str, Any]], origin: int) -> list[Span]:
    cards, lanes, spans = {}, {}, []
    for event in events:
        pid, tid = event["pid"], event["tid"]
        if event["ph"] == "M":
            if event["name"] == "process_name":
                cards[pid] = event["args"]["name"]
            else:
                lanes[pid, tid] = event["args"]["name"]
        elif event["ph"] == "X":
            start = origin + round(event["ts"] * 1000)
            end = start + round(event["dur"] * 1000)
            texts = cards[pid], event["name"], event["cat"], lanes[pid, tid]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError(f"expected texts, not {texts}")
            card, name, kind, lane = texts
            spans.append(Span(card=card, name=name, kind=kind, start_ns=start, end_ns=end, lane=lane))
    return spans
