"""Find and make the algorithm that `algorithm.name` names."""

from fusion.telemetry.classes import find_class
from fusion.training.algorithms.interface import Algorithm
from fusion.training.config import ALGORITHMS, AlgorithmConfig


def find_algorithm(name: str) -> type[Algorithm]:
    """Import the class of an algorithm, a key of `ALGORITHMS`."""
    return find_class(name, ALGORITHMS, key=f"algorithm.name={name}")


def make_algorithm(config: AlgorithmConfig, max_response_length: int) -> Algorithm:
    """Build the algorithm named by `algorithm.name` for responses bounded by ``max_response_length`` tokens."""
    return find_algorithm(config.name)(config, max_response_length)
