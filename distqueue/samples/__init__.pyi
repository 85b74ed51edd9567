from .table import SampleTable as SampleTable
from .types import Ended as Ended
from .types import Selection as Selection
from .types import Span as Span
from .types import Taken as Taken
