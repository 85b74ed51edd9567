"""Optimizer state and whatever else generation does not need: out of HBM to the host and back, bitwise.

    card:  exp_avg, exp_avg_sq, masters, …                      card:  nothing, the views wait
                  │ Offloader.out({name: tensor})                          │ Offloader.back(names, owner)
                  ▼ a stream of its own                                    ▼
    host:  HostPool, pinned, one buffer a name, taken once ───────────────►

    gradients:  their content is dead after a step: storage released without a copy, `Buckets.release`

pool: HostPool; offload: Offloader.
"""

from fusion.offload.offload import Offloader
from fusion.offload.pool import HostPool

__all__ = ["HostPool", "Offloader"]
