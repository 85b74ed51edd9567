from .buffer import Entry as Entry
from .buffer import RequestBuffer as RequestBuffer
from .dispatch import EngineRoom as EngineRoom
from .dispatch import PoolRouting as PoolRouting
from .dispatch import assign_groups as assign_groups
from .orders.length_classes import HistoPipeSpec as HistoPipeSpec
from .types import EvalAnswer as EvalAnswer
from .types import SuspendedSample as SuspendedSample
