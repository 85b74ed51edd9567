"""A run as `scripts/train.py` starts it, whose controller counts what it receives.

    python tests/stalesync/counted_run.py COUNTS.json overrides …

`queue_bytes` by column: payload that the controller's handle on the queue returned; `queue_total_bytes`: with metadata;
`samples`: that it returned a text of; `reports`: of every stage report or control answer, the bytes of what it holds
beside metrics, spans and memory, how many items that describes, and the bytes of their texts.
"""

import json
import pickle
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

MEASURED = ("metrics", "spans", "memory")


@contextmanager
def counting(target):
    """Count in the block, and write then."""
    from distqueue import DistQueue
    from fusion.colocate import StageReport
    from stalesync.cards.cards import Cards

    columns, reports, handles = {}, [], []
    create, get, read, ask = DistQueue.create, DistQueue.get, DistQueue.read, Cards.ask_each
    wait = Cards.wait_all

    def counted_create(*args, **options):
        handles.append(create(*args, **options))
        return handles[-1]

    def counted(method):
        def call(self, *args, **options):
            batch = method(self, *args, **options)
            for name, column in batch.columns.items():
                size, rows = columns.get(name, (0, 0))
                columns[name] = size + column.buffer.nbytes, rows + len(batch)
            return batch

        return call

    def note(stage, held):
        if any(held):
            texts = sum(len(getattr(one, "text", "").encode()) for part in held for one in part)
            reports.append((stage, len(pickle.dumps(held)), sum(len(part) for part in held), texts))

    def counted_wait(self, stages):
        results = wait(self, stages)
        for running, reports in zip(stages, results, strict=True):
            for report in reports:
                if isinstance(report, StageReport):
                    held = [getattr(report, field.name) for field in fields(report) if field.name not in MEASURED]
                    note(running.stage, [part for part in held if not isinstance(part, int)])
        return results

    def counted_ask(self, calls):
        answers = ask(self, calls)
        for call, answer in zip(calls.values(), answers, strict=True):
            if isinstance(answer, list):
                note(call.stage, [answer])
        return answers

    DistQueue.create, DistQueue.get, DistQueue.read = counted_create, counted(get), counted(read)
    Cards.wait_all, Cards.ask_each = counted_wait, counted_ask
    try:
        yield
    finally:
        DistQueue.create, DistQueue.get, DistQueue.read = create, get, read
        Cards.wait_all, Cards.ask_each = wait, ask
        (queue,) = handles
        found = {"queue_bytes": {name: size for name, (size, _) in columns.items()}, "reports": reports}
        found |= {"queue_total_bytes": queue.traffic.received_bytes}
        Path(target).write_text(json.dumps(found | {"samples": max(rows for _, rows in columns.values())}))


if __name__ == "__main__":
    sys.path.insert(0, "scripts")
    import train

    with counting(sys.argv.pop(1)):
        train.main()
