"""Roles that share cards: the actor's training and generation, reference, reward model.

    deployment   which roles live on which cards                            ┐
    phases       the phases of a card: what leads where, what each serves   │ pure
    route        where the actor's weights go when the phase changes        │
    residency    whose weights are in HBM while frozen models compute       │
    share        what the inference phase may use                           ┘
    spec, meshes       what every card is told; its process groups
    weights, frozen    the actor's weights in two layouts; weights that wait on the host
    switching, roles   a card changes its phase; reference and reward model on a card
    arrivals, shadow   new weights come in beside an engine that goes on with the old ones
    partials           samples that were suspended, in the queue until an engine goes on with them
    pace, paced        what an emulated card stands for; trainer, engine and switch that take its time
    generating, reading    the engine at work; what a card reads from the queue
    saving             a checkpoint is copied in a pause and written beside what follows
    worker, stages     Worker: switch, generate, reference, score, train, save; what a card tells of each

A worker knows nothing of Ray: `stalesync` starts it as an actor, a test calls it in its own process.
"""

from fusion.colocate.deployment import Deployment, Role, deploy
from fusion.colocate.partials import Suspended
from fusion.colocate.phases import Phase, PhaseError, PhaseMachine
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import RewardModelSpec, WorkerSpec, engine_size
from fusion.colocate.stages import OutOfMemory, StageReport
from fusion.colocate.together import BrokenOff
from fusion.colocate.worker import Worker

__all__ = [
    "BrokenOff",
    "Deployment",
    "InferenceShare",
    "OutOfMemory",
    "Phase",
    "PhaseError",
    "PhaseMachine",
    "RewardModelSpec",
    "Role",
    "StageReport",
    "Suspended",
    "Worker",
    "WorkerSpec",
    "deploy",
    "engine_size",
]
