"""Roles that share cards: the actor's training and generation, reference, reward model.

    deployment   which roles live on which cards                            ┐
    phases       the phases of a card: what leads where, what each serves   │ pure
    share        what the inference phase may use                           ┘
    spec, meshes       what a run asks of every card; the card's process groups
    weights/           the actor's weights in two layouts, and how they change from one to the other
    frozen/            reference and reward model: where their weights are, and what they compute
    samples/           what a stage reads from the queue
    parts, card        factories of what a card is built of; a card that is loaded
    paced              trainer, engine and switch of an emulated card that take the time of the one it stands for
    checkpoint_writer  copies the trainer's state in a pause and writes it in the background
    worker, stages     Worker: switch, generate, reference, score, train, save; the report of each

A worker knows nothing of Ray: `stalesync` starts it as an actor, a test calls it in its own process.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
