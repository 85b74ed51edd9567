"""Optimizer state and whatever else generation does not need: out of HBM to the host and back, bitwise.

    card:  exp_avg, exp_avg_sq, masters, …                           card:  nothing, the views wait
               │ Offloader.out({name: tensor}), poll, wait                │ Offloader.back(names), wait(names)
               ▼ a stream of its own, in pieces                           ▼ a stream of its own, in pieces
    host:  HostPool: pinned arenas, taken once, reused ──────────────────►

    gradients:      dead after a step: Offloader.drop, no copy; out and back where a partial accumulation is alive
    offload=stream: StreamedStates: states live on the host, two groups of them are in HBM while a step runs
    back to TRAIN:  plan_return (pure): over the wire or from the masters on the host, part by part

offload: Offloader; pool: HostPool; states: StreamedStates; plan: Part, ReturnPlan, plan_return.
"""

from fusion.offload.offload import Offloader
from fusion.offload.plan import Part, ReturnPlan, plan_return
from fusion.offload.pool import HostPool
from fusion.offload.states import StreamedStates

__all__ = [
    "HostPool",
    "Offloader",
    "Part",
    "ReturnPlan",
    "StreamedStates",
    "plan_return",
]
