"""Models that are never trained: reference and reward model.

residency    whose weights are in HBM while they compute (pure)
weights      weights on a card that others need too
roles        FrozenRoles: both of them on one card
scoring      what they say of samples;   retokenize   for a reward model with another tokenizer
"""
