"""Reshard weights from any layout to any other on the same cards, bucket by bucket, without a second copy.

    Layout(config, parallel, ranks) ─┐  layout     which rank holds which box of which tensor, in which unit of storage
    Layout(config, parallel, ranks) ─┤  topology   location of the ranks and bandwidth of their links
                                     ▼
    plan_switch(source, target, bucket_bytes) ──► Plan      plan, order (pure): moves in rounds, storage in order
                                                   │        moves: Move, Round, Step (a round as a rank sees it)
    Switcher(plan, trainer, engine, …).run() ◄─────┘        transfer: runs rounds, two in flight; fails on all ranks
              │                                             program: a rank's rounds; segment: their views of storage
              │                                             opening, exchange: read in place (peer_sockets) or
              │                                             collective; buckets: both ends; fill: units from the host
              │                                             unit_sources (pure): wire or host, unit by unit
              │                                             card_values: correction biases, which are in no unit
              ▼
    SwitchReport, or SwitchError on every rank              outcome; stopwatch: seconds by part
    weights_checksum: equal in every layout                 checksum: also of sent data
    FusionConfig                                            config: the group `fusion`

Every rank computes the same plan from the same two layouts; only weights (and, if enabled, checksums) are sent.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
