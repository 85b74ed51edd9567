"""Switch the actor's weights on a card between the training and the inference layout.

route             the ranks that send and receive weights when the phase changes             ┐ pure
masters           the units that a rank rounds from host masters when it switches to training ┘
policy            PolicyWeights: the weights in the training layout, the engine's, or alternately in both
switching         PhaseSwitcher: releases, moves and allocates memory, in order
staged_weights    StagedWeights: new weights, received while the model decodes with the old ones
weight_receiver   WeightReceiver: the thread that receives them
"""
