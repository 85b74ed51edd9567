"""What another process computes of a plan: a module that imports little."""

from __future__ import annotations

from fusion.ep_switch import Layout, Topology, plan_switch
from fusion.model import Parallel
from tests.helpers import tiny_config

WORLD4 = (0, 1, 2, 3)
CONFIG = tiny_config(num_hidden_layers=6, hidden_size=64, moe_intermediate_size=64, vocab_size=128)


def digest_of_plan() -> tuple[int, int]:
    """Return the digest of a plan, and one of the order of everything in it."""
    grids = Parallel(4, 2, pp=2), Parallel(4, 1, 4)
    source, target = (Layout(CONFIG, grid, WORLD4, bucket_bytes=1 << 14) for grid in grids)
    plan = plan_switch(source, target, 1 << 14, Topology(1, 2, 4, (9.0, 9.0, 1.0, 1.0)))
    text = "".join(repr([[*round_.moves], round_.allocate_before, round_.release_after]) for round_ in plan.rounds)
    return plan.digest, sum(place * ord(letter) for place, letter in enumerate(text))
