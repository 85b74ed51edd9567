from .errors import JournalFull as JournalFull
from .errors import QueueClosed as QueueClosed
from .errors import QueueDrained as QueueDrained
from .queue import QueueCore as QueueCore
from .readers import Share as Share
