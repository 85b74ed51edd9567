from .group import LoggerGroup as LoggerGroup
from .interface import LoggedRun as LoggedRun
from .interface import Logger as Logger
from .registry import check_loggers as check_loggers
from .registry import find_loggers as find_loggers
