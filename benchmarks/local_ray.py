"""Start the Ray of a benchmark on this machine."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from pathlib import Path

import ray

from stalesync.process.ray_folder import PREFIX, RAY, root_of


def start_ray(num_cpus: int) -> None:
    """Start a Ray of its own, with workers at the niceness of this process, as a run does (`stalesync/launch.py`)."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root_of(os.environ)))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder / RAY),
    )
