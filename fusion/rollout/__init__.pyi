from .buffer import Entry as Entry
from .buffer import RequestBuffer as RequestBuffer
from .engine_room import EngineRoom as EngineRoom
from .length_classes import HistoPipeSpec as HistoPipeSpec
from .router import PoolRouting as PoolRouting
from .router import assign_groups as assign_groups
from .types import EvalAnswer as EvalAnswer
from .types import SuspendedSample as SuspendedSample
