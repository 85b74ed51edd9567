"""Run the store through which engines exchange text for drafts, as a Ray actor. The run does not depend on it.

first card of a schedule ─ bytes: what it has generated, cursors ─► TextServer ─ bytes: what others have ─►
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from fusion.colocate import WorkerSpec
from fusion.rollout.drafts.exchange import answer
from fusion.rollout.drafts.text_store import TextStore


class TextServer:
    """`TextStore` as an actor; the arguments are the store's."""

    def __init__(self, max_bytes: int, max_groups: int, max_age: int | None) -> None:
        self._store = TextStore(max_bytes, max_groups, max_age)

    def answer(self, message: bytes) -> bytes:
        """Answer a message of a `TextExchange`; raise ValueError if it is malformed."""
        return answer(self._store, message)


@contextmanager
def text_server(spec: WorkerSpec) -> Iterator[Any]:
    """Run the server in the block, and yield its handle; None: there are no drafts, or no one to exchange with."""
    drafts = spec.rollout.drafts
    if not drafts.is_on or not drafts.exchange or len(spec.drafting_ranks) < 2:
        yield None
        return
    max_groups = 1 + drafts.history if drafts.from_history else 1
    remote: Any = ray.remote
    server = remote(num_cpus=0)(TextServer).remote(drafts.mib << 20, max_groups, drafts.max_age)
    try:
        yield server
    finally:
        ray.kill(server)


def caller(server: Any) -> Callable[[bytes], bytes] | None:
    """Return a function that sends a message to the server and returns its reply; None: there is no server."""
    return None if server is None else lambda message: ray.get(server.answer.remote(message))
