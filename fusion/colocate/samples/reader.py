"""Read a stage's samples from the queue by id: on each rank of a replica, the columns that it needs."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from distqueue import PackedBatch, SampleQueue, SamplesLost
from distqueue.hierarchy import GroupReader, Received
from distqueue.hierarchy.reader import Readable
from fusion.colocate.meshes import Meshes
from fusion.colocate.samples.sequences import LOSS, REFERENCE, empty_samples, stage_columns, to_sequences
from fusion.colocate.spec import WorkerSpec
from fusion.model import Mesh
from fusion.rollout.packing import KEPT, ROUTING, SAMPLED, SHARE
from fusion.telemetry import WAIT_DATA, Metrics, Timeline
from fusion.training import Sequences, TrainEngine

log = logging.getLogger(__name__)


class ReadAhead:
    """A queue's `read`, of which one may be begun, in a thread, while the card computes on the batch before. Not
    thread-safe.

    Invariants: `read` returns, and raises, what the queue's `read` does; at most one batch is held ahead; a batch that
    was begun is delivered to the next `read` only, and only if that asks for the same samples and columns."""

    def __init__(self, queue: Readable):
        self._queue = queue
        self._thread = ThreadPoolExecutor(1, "read ahead")
        self._begun: tuple[tuple[str, ...], tuple[str, ...], Future[PackedBatch]] | None = None
        """Ids and columns of the batch that is held ahead, and the batch"""

    def begin(self, ids: Sequence[str], columns: Sequence[str]) -> None:
        self._begun = tuple(ids), tuple(columns), self._thread.submit(self._queue.read, ids, columns)

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """Return these samples, as the queue's `read` does."""
        begun, self._begun = self._begun, None
        if begun is not None and begun[:2] == (tuple(ids), tuple(columns)):
            return begun[2].result()
        return self._queue.read(ids, columns)


class StageReader:
    """Read samples for the stages of a card. Collective over a replica of the stage's mesh, which makes one request to
    the queue. ``timeline``: records the wait; ``metrics``: what is read, and what is saved."""

    def __init__(self, spec: WorkerSpec, meshes: Meshes, queue: SampleQueue, *, timeline: Timeline, metrics: Metrics):
        self.spec, self._meshes, self._queue = spec, meshes, ReadAhead(queue)
        self._timeline, self._metrics = timeline, metrics
        self.readers: dict[str, GroupReader] = {}
        """Group readers by stage, created at its first batch"""
        self._has_lost = False

    def __call__(
        self,
        stage: str,
        ids: Sequence[str],
        mesh: Mesh,
        *,
        loss_columns: Sequence[str] = (),
        expert_columns: Sequence[str] = (),
    ) -> Received:
        """Read samples with the columns that this rank of the stage's ``mesh`` needs (`stage_columns`); without those
        that the queue has lost. Where log-probabilities are renormalised, whoever computes them reads the kept ids;
        of conversations every rank reads what was sampled, as the divisors of a loss are known to all."""
        kept = KEPT if self.spec.rollout.truncates and stage != "score" else ()
        sampled = (SAMPLED,) if self.spec.turns and stage != "score" else ()
        columns = stage_columns(mesh, (*loss_columns, *kept), (*expert_columns, *sampled))
        if not ids:
            return empty_samples(columns)
        if stage not in self.readers:
            group = self._meshes.replica if mesh is self._meshes.train else mesh.tp_group
            self.readers[stage] = GroupReader(self._queue, group, columns)
        with self._timeline.span("read", WAIT_DATA):
            while ids:
                try:
                    return self._counted(self.readers[stage], ids)
                except SamplesLost as error:  # on every rank of the replica
                    log.error("stage %r continues without %d samples: %s", stage, len(error.ids), str(error))
                    lost, self._has_lost = {*error.ids}, True
                    ids = [id for id in ids if id not in lost]
        return empty_samples(columns)

    def _counted(self, reader: GroupReader, ids: Sequence[str]) -> Received:
        received, leads = reader.read(ids), reader.rank == 0
        columns = received.batch.columns.values()
        num_bytes = sum(column.buffer.nbytes for column in columns)
        self._metrics.add("distqueue/read_bytes_total", num_bytes)
        self._metrics.add("distqueue/padding_saved_bytes_total", sum(one.padded_bytes for one in columns) - num_bytes)
        self._metrics.add("distqueue/read_requests_total", leads)
        self._metrics.add("distqueue/read_requests_saved_total", not leads)
        return received

    def take_lost(self) -> bool:
        """Return whether the queue has lost samples that were read since the last call."""
        has_lost, self._has_lost = self._has_lost, False
        return has_lost

    def _begin(self, stage: str, ids: Sequence[str]) -> None:
        """Begin to read samples that the next call for the stage reads; on the rank that asks the queue."""
        reader = self.readers.get(stage)
        if reader is not None and reader.rank == 0:
            self._queue.begin(ids, reader.union)

    def minibatches(
        self, trainer: TrainEngine, minibatches: Sequence[Sequence[str]], weigh: Callable[[Sequences], Sequences]
    ) -> Iterable[Sequences]:
        """Read this rank's samples of each minibatch when it is their turn, from the queue while the card computes on
        the minibatch before; all at once where each needs the routing or log-probabilities of the policy before the
        first update, which a single minibatch does not. ``weigh`` gives the tokens their weights."""
        batches: Iterable[Sequences] = (
            replace(weigh(self._read_minibatch(trainer, ids, following)), updated=number > 0)
            for number, (ids, following) in enumerate(zip(minibatches, [*minibatches[1:], ()], strict=True))
        )
        if len(minibatches) > 1 and self.spec.algorithm.replay == "train":
            batches = [trainer.with_own_routing(batch) for batch in batches]
        if len(minibatches) > 1 and self.spec.algorithm.corrects_by == "decoupled":
            batches = [replace(batch, proximal_logprobs=trainer.logprobs(batch)[0]) for batch in batches]
        return batches

    def _read_minibatch(self, trainer: TrainEngine, ids: Sequence[str], following: Sequence[str]) -> Sequences:
        """Read the samples ``ids``, and begin to read those of the ``following`` minibatch."""
        mesh, algorithm = trainer.model.mesh, self.spec.algorithm
        has_reference = self.spec.deployment.reference and algorithm.kl_in == "loss"
        received = self(
            "train",
            ids,
            mesh,
            loss_columns=(*LOSS, REFERENCE) if has_reference else LOSS,
            expert_columns=(
                *((ROUTING,) if algorithm.replay == "rollout" else ()),
                *((SHARE,) if self.spec.turns else ()),  # also for the divisors of a loss
            ),
        )
        if following:
            self._begin("train", following)
        config = trainer.model.config
        sequences = to_sequences(received, config.sparse(mesh.parallel.layers(config.num_layers, mesh.pp_rank)))
        return sequences.until_trained() if self.spec.turns else sequences
