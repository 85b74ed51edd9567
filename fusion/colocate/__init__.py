"""Roles that share cards: the actor's training and generation, reference, reward model.

    deployment   which roles live on which cards                            ┐
    phases       the phases of a card: what leads where, what each serves   │ pure
    share        what the inference phase may use                           ┘
    spec, meshes       what every card is told; its process groups
    weights/           the actor's, in two layouts: where they go, how, and who waits for whom
    frozen/            reference and reward model: where their weights are, what they say
    samples/           between queue, engine and trainer
    paced              trainer, engine and switch of an emulated card that take the time of the one it stands for
    checkpoint_writer  a checkpoint is copied in a pause and written beside what follows
    worker, stages     Worker: switch, generate, reference, score, train, save; what a card tells of each

A worker knows nothing of Ray: `stalesync` starts it as an actor, a test calls it in its own process.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
