"""What the queue decides, all of it: who may put, who gets which samples, which file is written next. No process, no
payload, no clock of its own: `LocalQueue` and the queue's actor drive the same core.

    put     ask_room ──► a file to write ──► commit ──► rows, served to whoever waits for them       writers.py
    get     ask ──► a Waiter: served at once, or when a put, an ended lease or a drop makes it so    readers.py
    ack, drop, renew, seal: queue.py, QueueCore, on the table (`distqueue.samples`) and the ledger (`segments.py`)
    stats, state: report.py
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
