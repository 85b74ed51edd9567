"""Models that are never trained: reference and reward model.

residency    whose weights are in HBM while a role computes (pure)
weights      a role's weights on a card that is shared with training
roles        FrozenRoles: reference and reward model on one card
scoring      log-probabilities and scores of samples;   retokenize   for a reward model with another tokenizer
"""
