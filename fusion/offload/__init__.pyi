from .config import OffloadConfig as OffloadConfig
from .offload import Offloader as Offloader
from .pool import HostPool as HostPool
from .states import StreamedStates as StreamedStates
