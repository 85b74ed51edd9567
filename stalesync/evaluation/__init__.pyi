from .config import EvalConfig as EvalConfig
from .evaluation import Evaluation as Evaluation
from .files import EvalFile as EvalFile
from .files import open_files as open_files
from .history import EvalHistory as EvalHistory
from .results import FileResult as FileResult
