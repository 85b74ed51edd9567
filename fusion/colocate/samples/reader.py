"""What a card reads from the queue for a stage: samples by id, as far as its rank looks at them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from distqueue.hierarchy import GroupReader, Received
from fusion.colocate.meshes import Meshes
from fusion.colocate.samples.sequences import LOSS, REFERENCE, needed, nothing, to_sequences
from fusion.colocate.spec import WorkerSpec
from fusion.model import Mesh
from fusion.rollout.packing import ROUTING
from fusion.rollout.partial_samples import SampleStore
from fusion.telemetry import WAIT_DATA, Timeline
from fusion.training import Sequences, TrainEngine


class StageReader:
    """Collective over a replica of the stage's mesh, which asks the queue once. ``timeline``: is told of the wait."""

    def __init__(self, spec: WorkerSpec, meshes: Meshes, queue: SampleStore, timeline: Timeline):
        self.spec, self._meshes, self._queue, self._timeline = spec, meshes, queue, timeline
        self.readers: dict[str, GroupReader] = {}
        """By stage, from its first batch on"""

    def __call__(
        self, stage: str, ids: Sequence[str], mesh: Mesh, of_loss: Sequence[str] = (), of_experts: Sequence[str] = ()
    ) -> Received:
        """Samples with what this rank of the stage's ``mesh`` looks at."""
        columns = needed(mesh, of_loss, of_experts)
        if not ids:
            return nothing(columns)
        if stage not in self.readers:
            group = self._meshes.replica if mesh is self._meshes.train else mesh.tp_group
            self.readers[stage] = GroupReader(self._queue, group, columns)
        with self._timeline.span("read", WAIT_DATA):
            return self.readers[stage].read(ids)

    def minibatches(
        self,
        trainer: TrainEngine,
        minibatches: Sequence[Sequence[str]],
        weigh: Callable[[Sequences], Sequences],
    ) -> Iterable[Sequences]:
        """This rank's samples of each minibatch, read when it is their turn; or all at once, where each has to know
        what the policy before the first step says of it: its routing, or log-probabilities. One alone needs none.

        Args:
            weigh: gives the tokens their weights.
        """
        batches: Iterable[Sequences] = (weigh(self._minibatch(trainer, ids)) for ids in minibatches)
        if len(minibatches) > 1 and self.spec.algorithm.replay == "train":
            batches = [trainer.with_own_routing(batch) for batch in batches]
        if len(minibatches) > 1 and self.spec.algorithm.corrects_by == "decoupled":
            batches = [replace(batch, proximal_logprobs=trainer.logprobs(batch)[0]) for batch in batches]
        return batches

    def _minibatch(self, trainer: TrainEngine, ids: Sequence[str]) -> Sequences:
        mesh, algorithm = trainer.model.mesh, self.spec.algorithm
        of_loss = (*LOSS, REFERENCE) if self.spec.deployment.reference and algorithm.kl_in == "loss" else LOSS
        of_experts = (ROUTING,) if algorithm.replay == "rollout" else ()
        layers = mesh.parallel.layers(trainer.model.config.num_layers, mesh.pp_rank)
        return to_sequences(self("train", ids, mesh, of_loss, of_experts), layers)
