"""Run several roles on shared cards: the actor's training and generation, reference, reward model.

    config       the group `fusion`, with the keys of ep_switch and offload ┐
    deployment   assigns roles to cards                                     │
    phases       phases of a card, their transitions and requests           │ pure
    share        resources of the inference phase                           ┘
    spec, meshes       plain data of a run for every card; the card's process groups
    weights/           the actor's weights in two layouts, and the switch between them
    frozen/            reference and reward model
    samples/           reading the samples of a stage from the queue
    parts, card        factories of a card's components; a loaded card
    paced              trainer, engine and switch of an emulated card that take the time of a modelled card
    checkpoint_writer  copies the trainer's state in a pause and writes it in the background
    rendezvous         joins the cards in one process group
    loaded_worker      opens and loads a card, joins the others
    worker, stages     Worker: switch, generate, reference, score, train, save; the report of each

A worker does not depend on Ray: `stalesync` starts it as an actor, a test calls it in its own process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
