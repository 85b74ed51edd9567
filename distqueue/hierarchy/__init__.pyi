from .reader import GroupReader as GroupReader
from .reader import Received as Received
