from .interface import Algorithm as Algorithm
from .registry import find_algorithm as find_algorithm
from .registry import make_algorithm as make_algorithm
from .sft import cross_entropy as cross_entropy
