"""Reshard weights from any layout to any other on the same cards, bucket by bucket, without a second copy.

    Layout(config, parallel, ranks) ─┐  layout     which rank holds which box of which tensor, in which unit of storage
    Layout(config, parallel, ranks) ─┤  topology   location of the ranks and bandwidth of their links
                                     ▼
    plan_switch(source, target, bucket_bytes) ──► Plan      plan, order (pure): moves in rounds, storage in order
                                                   │        moves: Move, Round; host_plan: their parts
    Switcher(plan, trainer, engine, …).run() ◄─────┘        transfer: runs rounds, two in flight; fails on all ranks
              │                                             program: a rank's rounds; segment: their views of storage
              │                                             opening, exchange: read in place (peer_sockets) or
              │                                             collective; buckets: both ends; fill: units from the host
              │                                             unit_sources (pure): wire or host, unit by unit
              ▼
    SwitchReport, or SwitchError on every rank              outcome; seconds by part
    weights_checksum: equal in every layout                 checksum: also of sent data
    SwitchConfig                                            config: its keys of the group `fusion`

The first rank of every host computes the same plan from the same two layouts, and sends the others of its host their
parts (`host_plan`); from then on only weights (and, if enabled, checksums) are sent.

Words of the planner, from storage to rounds:

    unit       storage that is allocated, freed, shared as one; slab: its distinct content, with the ranks that own it
    fragment   elements that the same slabs of the source hold and the same slabs of the target need
    giver      place to read a fragment from; taker: place to write it to
    family     slabs of the target that have elements in common, and the fragments that fill them; the order is one of
               families, or of clusters of them (`order`)
    way        how a fragment reaches all ranks that need it, as actions, each over one class of links (`senders`)
    deal       the division of what several ranks could send, so that none sends much more than others (`balance`)
    hop        the transfer of elements of a fragment from one rank to another; hops are rows of numbers (`hops`);
               move: a hop with its storage addresses, made for the rank that acts
    segment    all that one rank sends to another in a round; run: elements of it that are contiguous in storage
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
