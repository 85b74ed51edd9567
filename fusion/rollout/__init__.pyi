from .buffer import Entry as Entry
from .buffer import RequestBuffer as RequestBuffer
from .router import assign_groups as assign_groups
from .types import Answer as Answer
from .types import SuspendedSample as SuspendedSample
