"""Report on a queue: metrics, and which readers and writers wait for what."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distqueue.core.queue import QueueCore


def stats(core: QueueCore, now_s: float) -> dict[str, float]:
    """Metrics by name, listed at `SampleQueue.stats`."""
    table = core.table.stats(now_s)
    waiters = dict.fromkeys(core.table.tasks, 0)
    for waiter in core.readers.all_waiting():
        waiters[waiter.selection.task] += 1
    metrics: dict[str, float] = {
        "distqueue/rows": len(core.table),
        "distqueue/bytes": core.ledger.nbytes,
        "distqueue/spilled_bytes": sum(s.nbytes for s in core.ledger.segments.values() if s.spilled),
        "distqueue/late": core.late,
    }
    metrics |= {f"distqueue/ended/{name}": ended for name, ended in table["ended"].items()}
    for task, figures in table["tasks"].items():
        metrics |= {
            f"distqueue/{task}/depth": figures["open"],
            f"distqueue/{task}/leased": figures["leased"],
            f"distqueue/{task}/waiters": waiters[task],
            f"distqueue/{task}/redelivered": figures["redelivered"],
            f"distqueue/{task}/age_s": figures["age_s"],
        }
    return metrics


def state(core: QueueCore, now_s: float) -> dict[str, Any]:
    """The state that `python -m distqueue` prints: stats, shards, and who waits for what, for how long, and why."""
    waiting = [
        {
            "task": selection.task,
            "columns": selection.required,
            "waiters": len(waiters),
            "longest_s": now_s - waiters[0].since_s,
            "why": core.table.explain(selection),
        }
        for selection, waiters in core.readers.waiting.items()
    ]
    shards = [
        {
            "name": shard.name,
            "folder": shard.folder,
            "segments": sum(segment.number not in core.writers.granted for segment in core.ledger.of_shard(shard.name)),
            "bytes": shard.held,
            "max_bytes": shard.max_bytes,
            "leaving": shard.leaving,
        }
        for shard in core.ledger.shards.values()
    ]
    return {
        "stats": stats(core, now_s),
        "waiting": waiting,
        "shards": shards,
        "columns": {name: list(layout.fields) for name, layout in core.layouts.items()},
        "writing": len(core.writers.reserved),
        "granted": len(core.writers.granted),
        "waiting_writers": [writer.full for writer in core.writers.waiting],
        "sealed": core.sealed,
        "tasks": core.table.tasks,
    }
