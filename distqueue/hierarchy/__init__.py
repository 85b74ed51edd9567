"""One read for all ranks that need the same samples: the leader requests a batch and a tree of ranks forwards it.

    queue ◄─ one request ─ leader ─► metadata: 1 message │ payload: 1 message per dtype ─► children ─► theirs …

The leader is rank 0 of the group.

    reader.py      GroupReader, the queue's interface for the ranks of a group; Received, what each rank gets
    exchange.py    a rank's messages along the tree
    tree.py        plans which rank forwards which columns to which others: pure
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
