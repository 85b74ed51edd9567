"""Offload optimizer state, and other tensors that generation does not need, from HBM to the host and back, bitwise.

    card:  exp_avg, exp_avg_sq, masters, …                           card:  nothing, the views are unusable
               │ Offloader.out({name: tensor}), poll, wait                │ Offloader.back(names), wait(names)
               ▼ a separate stream, in pieces                             ▼ a separate stream, in pieces
    host:  HostPool: pinned arenas, allocated once, reused ──────────────►

    gradients:      out and back while they hold a partial accumulation; after a step the trainer releases them
    offload=stream: StreamedStates: states are kept on the host, two groups of them are in HBM while a step runs

config: OffloadConfig, its key of the group `fusion`; offload: Offloader; pool: HostPool; states: StreamedStates."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
