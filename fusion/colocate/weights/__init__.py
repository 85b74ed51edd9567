"""The actor's weights on a card, and how they change their layout.

route        where they go when the phase changes                                      ┐ pure
masters      on the way back: which of them a rank rounds from masters on the host     ┘
policy       PolicyWeights: in the training layout, in an engine's, or in each in turn
switching    PhaseSwitcher: what leaves, what moves, what comes, and in which order
weight_receiver, staged_weights   new ones come in beside an engine that goes on with the old ones
"""
