"""Many engines behind one face.

    router    which engine serves which group: pure

An engine is one TP/EP group. What will stand here beside the router: the request buffer of divided rollouts, the
context manager, the KV pool, drafts.
"""

from fusion.rollout.router import assign_groups

__all__ = ["assign_groups"]
