"""Ranks that need the same samples read once: the leader asks the queue, and a tree of ranks passes on what it got.

    queue ◄─ one request ─ leader ─► metadata: 1 message │ payload: 1 message a dtype ─► children ─► theirs …

The leader is rank 0 of the group.

    reader.py      GroupReader, a queue's face for the ranks of a group; Received, what each of them gets
    exchange.py    the messages of a rank along the tree, counted
    tree.py        who passes on what to whom, and what that saves: pure
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
