"""How a queue ends for those who use it."""


class QueueClosed(RuntimeError):
    """The queue was closed, or what held it has died."""


class QueueDrained(QueueClosed):
    """The queue is sealed and this task has had everything."""
