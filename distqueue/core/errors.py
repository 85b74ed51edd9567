"""Errors that end the use of a queue."""

from distqueue.errors import StorageFull


class QueueClosed(RuntimeError):
    """The queue was closed, or a process that held it has died for good."""


class JournalFull(QueueClosed, StorageFull):
    """The queue was closed, as there was no space for its journal."""


class QueueDrained(QueueClosed):
    """The queue is sealed and this task has received everything."""
