"""Algorithms, one file each, with one interface (`interface.Algorithm`): advantages from rewards, loss from tokens.

    rewards of a group ─ filter_rule ─► None, or the rule that excludes it   ┐
    rewards_B, groups_B, lengths_B ─ advantages ─► advantages_B, trained_B   ┘ on the controller
    Sequences ─ weigh ─► with weights of tokens (aggregation)                ┐
    LossInput (n tokens) ─ loss ─► LossOutput (loss of each token)           ┘ in the trainer

A new algorithm is a new file and an entry in `ALGORITHMS` of `fusion/training/config.py`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
