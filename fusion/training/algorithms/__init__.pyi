from .interface import Algorithm as Algorithm
from .registry import ALGORITHMS as ALGORITHMS
from .registry import make_algorithm as make_algorithm
from .sft import cross_entropy as cross_entropy
