from .config import RolloutConfig as RolloutConfig
from .engine import EmbeddedEngine as EmbeddedEngine
from .interface import InferEngine as InferEngine
from .request import FinishReason as FinishReason
from .request import Output as Output
from .request import Request as Request
from .request import SamplingParams as SamplingParams
