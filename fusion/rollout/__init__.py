"""Many engines behind one face.

    buffer    the requests of all groups under way, and which engine has which: pure
    router    which engine serves which group: pure

An engine is one TP/EP group. What will stand here beside them: the context manager, the KV pool, drafts.
"""

from fusion.rollout.buffer import Entry, RequestBuffer
from fusion.rollout.router import assign_groups

__all__ = ["Entry", "RequestBuffer", "assign_groups"]
