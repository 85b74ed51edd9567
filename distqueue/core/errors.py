"""Errors that end the use of a queue."""


class QueueClosed(RuntimeError):
    """The queue was closed, or a process that held it has died for good."""


class QueueDrained(QueueClosed):
    """The queue is sealed and this task has received everything."""
