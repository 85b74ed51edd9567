from .face import Ended as Ended
from .face import Span as Span
from .face import Taken as Taken
from .face import Want as Want
from .table import SampleTable as SampleTable
