"""The actor's weights on a card, and how they change their layout.

route             which ranks send and receive them when the phase changes                       ┐ pure
masters           which units a rank rounds from masters on the host on the way back to training ┘
policy            PolicyWeights: in the training layout, in an engine's, or in each in turn
switching         PhaseSwitcher: what is released, moved and allocated, and in which order
staged_weights    StagedWeights: new weights beside a model that decodes with the old ones
weight_receiver   WeightReceiver: the thread that receives them
"""
