"""Start the Ray of a benchmark on this machine."""

from __future__ import annotations

import logging
import os

import ray


def start_ray(num_cpus: int) -> None:
    """Start a Ray of its own, with workers at the niceness of this process, as a run does (`stalesync/launch.py`)."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    ray.init(
        address="local", num_cpus=num_cpus, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
    )
