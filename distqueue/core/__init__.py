"""Every decision of the queue: who may put, who receives which samples, which file is written next.

No process, no payload, no clock: `LocalQueue` and the queue's actor drive the same core and pass the time in.

    put     ask_room ──► a file to write ──► commit ──► rows, served to the readers waiting for them      writers.py
    get     ask ──► a Waiter: served at once, or once a put, an expired lease or a drop makes it possible readers.py
    ack, drop, renew, seal: queue.py, QueueCore, on the table (`distqueue.samples`) and the ledger (`segments.py`)
    report.py      stats and state
    recovery.py    snapshots, journal events, and the core rebuilt from them
"""

from distqueue.core.queue import QueueCore

__all__ = ["QueueCore"]
