"""Offloads optimizer state, and whatever else generation does not need, from HBM to the host and back, bitwise.

    card:  exp_avg, exp_avg_sq, masters, …                           card:  nothing, the views wait
               │ Offloader.out({name: tensor}), poll, wait                │ Offloader.back(names), wait(names)
               ▼ a stream of its own, in pieces                           ▼ a stream of its own, in pieces
    host:  HostPool: pinned arenas, taken once, reused ──────────────────►

    gradients:      dead after a step: Offloader.drop, no copy; out and back where a partial accumulation is alive
    offload=stream: StreamedStates: states live on the host, two groups of them are in HBM while a step runs

offload: Offloader; pool: HostPool; states: StreamedStates.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
