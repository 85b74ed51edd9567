"""From any layout of the weights to any other on the same cards, bucket by bucket, without a second copy.

    Layout(config, parallel, ranks) ─┐  layout     which rank holds which box of which tensor, in which bucket
    Layout(config, parallel, ranks) ─┤
                                     ▼
    plan_switch(source, target, bucket_bytes) ──► Plan      plan, order (pure): moves in rounds, storage in order
                                                   │        moves: Move, Round, Step (a round as a rank sees it)
    execute(plan, trainer.model, engine.model, …) ◄┘        transfer: allocate, pack, exchange, unpack, release
                     │                                      buckets: both ends' storage and the wire buffers
                     ▼
    SwitchReport, or SwitchError on every rank              checksum: weights_checksum, equal in every layout
    FusionConfig                                            config: the group `fusion`

Every rank makes the same plan from the same two layouts; nothing but weights (and, if asked, checksums) travels.
"""

from fusion.ep_switch.checksum import weights_checksum
from fusion.ep_switch.config import FusionConfig
from fusion.ep_switch.layout import Layout
from fusion.ep_switch.plan import Move, Plan, Round, plan_switch
from fusion.ep_switch.transfer import Failure, SwitchError, SwitchReport, execute

__all__ = [
    "Failure",
    "FusionConfig",
    "Layout",
    "Move",
    "Plan",
    "Round",
    "SwitchError",
    "SwitchReport",
    "execute",
    "plan_switch",
    "weights_checksum",
]
