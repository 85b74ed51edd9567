"""Run the stages of one card, with the roles that its deployment assigns to it. One class for all deployments.

    prepare ─► TRAIN ──switch──► INFER ──switch──► TRAIN …          cards that only generate or score: STANDBY ─► …
                │                  │
                reference, score   generate (control calls meanwhile: submit, abort, …)
                train, snapshot    (save runs on a separate thread in any phase: it writes the copy of snapshot)

A stage is a method that all cards concerned run at once; between two stages a card only copies (the optimizer, to and
from the host). What a card consists of is `LoadedCard`; how it changes its phase is in `PhaseSwitcher`."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from distqueue import PackedBatch
from fusion.colocate.checkpoint_writer import CheckpointWriter
from fusion.colocate.loaded_worker import LoadedWorker
from fusion.colocate.phases import Phase
from fusion.colocate.samples.sequences import (
    REFERENCE,
    response_column,
    summed_log_ratios,
    to_sequences,
    tokens_of_samples,
)
from fusion.colocate.share import InferenceShare
from fusion.colocate.stages import StageReport
from fusion.inference import Request
from fusion.model import Mesh
from fusion.npu.all_or_none import all_or_none
from fusion.npu.failures import CollectiveFailed, clear_frames
from fusion.rollout import EndedConversation, SuspendedSample
from fusion.rollout.drafts.history_files import MAX_TOKENS, read_history, write_history
from fusion.rollout.engine_stage import EngineStage
from fusion.training import Sequences, TrainEngine, load_checkpoint
from fusion.training.interface import SKIPPED_IN_A_ROW


class Worker(LoadedWorker):
    """Stages are methods; all cards they concern run the same stage at once. Arguments and results are plain data."""

    def rejoin(self, restart: int) -> None:
        """Renew the groups in which an engine's cards were that have restarted since. Collective over the cards that
        train or generate, while they do neither. ``restart``: number of the last restart in the run."""
        card = self.card
        with card.log.work("rejoin", "switch"):
            card.meshes.renew_actor(self.spec, restart, card.device.process_group_backend)
            card.weights.renew_groups()

    def recover(self) -> None:
        """Return a card from a transfer of weights that has failed because another card has died; `rejoin` and another
        transfer must follow. On cards that only train, which have kept their weights, or only generate."""
        assert not self.spec.deployment.shared, "cards that train and generate have given up their training layout"
        if self.phases.phase is Phase.BROKEN:
            self.phases.arrive(Phase.TRAIN if self.rank in self.spec.deployment.train else Phase.STANDBY)
        if self.card.receiver is not None:
            self.card.receiver.recover()

    def switch(
        self, phase: str, version: int = 0, share: InferenceShare | None = None, while_generating: bool = False
    ) -> StageReport:
        """Switch the card to ``infer`` or to ``train``. Collective over the cards that train or generate. ``version``:
        the policy version whose weights the engines receive; ``share``: the engines that generate and their resources;
        None: all, as configured; ``while_generating``: cards that only generate decode on, and call `receive`."""
        card, target = self.card, Phase(phase)
        name = f"switch to {phase}"
        with self._stage(name, "switch"):
            if target is Phase.INFER:
                share = share or InferenceShare.of(self.spec.rollout, len(self.spec.engines))
                with self._leaving_after_failure():
                    try:
                        card.switcher.to_infer(version, share, while_generating)
                    except CollectiveFailed:
                        self.phases.arrive(Phase.BROKEN)  # also if the ranks could not agree to begin
                        raise
            else:
                card.switcher.to_train()
        if target is Phase.TRAIN and not card.roles.needs_room:
            # After the stage, which ends when the card has finished: these copies overlap with the next stage.
            with card.log.explain_out_of_memory(name):
                card.switcher.load_optimizer()
        return card.log.report()

    def receive(self, version: int, share: InferenceShare) -> StageReport:
        """Receive new weights on a card that only generates, while it generates. The other cards call `switch` to
        ``infer`` with ``while_generating``. Runs on a separate thread."""
        assert self.card.receiver is not None, f"rank {self.rank} does not receive weights while it generates"
        with self._leaving_after_failure():
            return self.card.receiver.receive(version, share)

    @contextmanager
    def _leaving_after_failure(self) -> Iterator[None]:
        """Leave the actor's group, in which others may wait, if the block fails and weights can be sent again."""
        try:
            yield
        except BaseException as error:
            if not self.spec.deployment.shared:
                clear_frames(error)  # the group's connections are closed with the last reference to it
                self.card.weights.renew_groups()
                self.card.meshes.leave_actor()
            raise

    def generate(self, requests: Sequence[Request], stay: bool = True) -> StageReport:
        """Run this card's engine until `pause` or, unless ``stay``, until it is idle; report the samples that are
        unfinished then (`StageReport.suspended`). Finished ones are put to the queue as they end. Collective over the
        engine. ``requests``: the first ones, on the engine's first card."""
        card = self.card
        self.phases.require("generate")
        try:
            with self._stage("generate", "gen"):
                suspended = self._generation.run(
                    requests, stay=stay, metrics=card.log.metrics, timeline=card.log.timeline
                )
                card.log.record_memory("infer")
        except BaseException as error:
            if card.receiver is not None:
                card.receiver.abort(error)
            raise
        return card.log.report(suspended=suspended)

    def answer(self, requests: Sequence[Request], rows: str = "") -> StageReport:
        """Run this card's engine until all requests have finished, while it has no others; report the answers.
        Collective over the engine. ``rows``: prefix of the queue's rows into which the answers' tokens are put for
        scoring; "": they are not stored (`EngineStage.answer`)."""
        card = self.card
        self.phases.require("generate")
        with self._stage("answer", "gen"):
            answers = self._generation.answer(requests, rows, card.log.timeline)
            card.log.record_memory("infer")
        return card.log.report(answers=answers)

    def reference(self, requested: Sequence[str]) -> StageReport:
        """Add the column `ref_logprobs` to samples, whose ids are those of this card's replica. Collective over the
        mesh of the reference model. With algorithm.kl_in=reward, and from cards of its own, report their
        `reference_kl`, from one card of each replica."""
        card = self.card
        mesh = card.meshes.reference or card.meshes.train
        assert mesh is not None
        weights = card.roles.reference_in_hbm(card.trainer)
        with self._stage("reference", "reference"), self._in_role("reference", Phase.REFERENCE, mesh, weights):
            with_kl = self.spec.algorithm.kl_in == "reward" or card.meshes.reference is not None
            delivery = card.reader(
                "reference", requested, mesh, loss_columns=("behaviour_logprobs",) if with_kl else ()
            )
            ids, sequences = delivery.batch.ids, to_sequences(delivery)
            logprobs = card.roles.logprobs(sequences, card.trainer)
            if _first_of_replica(mesh) and ids:
                columns = {REFERENCE: response_column(logprobs, sequences, delivery)}
                self.queue.put(PackedBatch.from_samples(ids, columns))
        reports_kl = with_kl and mesh.first_of_replica and mesh.last_stage
        sums = summed_log_ratios(sequences, logprobs) if reports_kl else []
        return card.log.report(reference_kl=dict(zip(ids, sums, strict=False)))

    def score(self, requested: Sequence[str]) -> StageReport:
        """Score samples of the queue with the reward model, ``requested``: ids of those of this card's replica.
        Collective over its mesh; the first card of a replica reports the outcomes."""
        card = self.card
        mesh = card.meshes.reward_model
        assert mesh is not None
        weights = card.roles.reward_model_in_hbm()
        with self._stage("score", "reward_model"), self._in_role("score", Phase.REWARD, mesh, weights):
            batch = card.reader("score", requested, mesh).batch
            outcomes = card.roles.scores(tokens_of_samples(batch))
        return card.log.report(scores=dict(zip(batch.ids, outcomes, strict=True)) if _first_of_replica(mesh) else {})

    def train(
        self, minibatches: Sequence[Sequence[str]], version: int | None = None, update: bool = True
    ) -> StageReport:
        """Run one optimizer step per minibatch, of ids of the samples of this card's replica; report `has_lost`.
        Gradients accumulated before count for the first one. Collective over the cards that train. ``version``: the
        policy version before this call; None: the samples' staleness is not reported; ``update``: False: only
        accumulates the gradients of a single minibatch, which the next call continues: the loss is then the mean over
        both."""
        card, trainer, mesh = self.card, self._trainer, self.card.meshes.train
        self.phases.require("train")
        assert mesh is not None and (update or len(minibatches) == 1)
        with self._stage("train" if update else "accumulate", "train"):
            card.switcher.load_optimizer()
            if not trainer.accumulating:
                all_or_none(
                    trainer.allocate_gradients,
                    group=card.meshes.trainers,
                    rank=self.rank,
                    stage="gradients",
                    device=card.device,
                )

            def weigh(sequences: Sequences) -> Sequences:
                return replace(card.algorithm.weigh(sequences), version=version)

            for number, batch in enumerate(card.reader.minibatches(trainer, minibatches, weigh)):
                continued, self._continues = self._continues, not update
                with card.log.timeline.span("forward_backward", "train"):
                    metrics = trainer.forward_backward(batch, card.algorithm.loss, continued=continued)
                if not update:
                    break  # those of the next call are of the whole minibatch
                card.log.metrics.update(metrics)
                before_update = card.switcher.await_optimizer if number == 0 else None
                with card.log.timeline.span("optimizer_step", "optimizer"):
                    figures = trainer.optimizer_step(before_update)
                card.log.metrics.update(figures)
                if self.rank == self.spec.deployment.train[0]:
                    skipped = figures[SKIPPED_IN_A_ROW] > 0
                    card.log.metrics.add("training/skipped_updates", skipped, rule="sum")
            card.log.record_memory("train")
        if update:
            card.switcher.unload_optimizer()
        return card.log.report(has_lost=card.reader.take_lost())

    def snapshot(self) -> StageReport:
        """Copy the trainer's state to host memory for `save`. The previous `save` must have finished."""
        self.phases.require("snapshot")
        with self.card.log.work("snapshot", "save"):
            self._checkpoint_writer.copy(self.card.switcher.training_state())
        return self.card.log.report()

    def save(self, checkpoint: str, export: str) -> None:
        """Write the copy of `snapshot`: the trainer's state to ``checkpoint``, the weights to the Hugging Face folder
        ``export``. Other stages may run meanwhile. Return when all cards' files are on disk."""
        self._checkpoint_writer.write(checkpoint, export)

    def restore(self, checkpoint: str, steps_left: int | None = None) -> None:
        """Load the trainer's state from the folder ``checkpoint``, which was saved in any layout and with files that
        the caller has verified. Collective over the cards that train. ``steps_left``: optimizer steps to the end; None:
        as configured. Raise ValueError if the folder is not a checkpoint, or belongs to another model or dtype."""
        self.phases.require("restore")
        with self.card.log.work("restore"):
            self.card.switcher.load_optimizer()
            self.card.switcher.await_optimizer()
            load_checkpoint(self._trainer, checkpoint, verify=False, steps_left=steps_left)

    def snapshot_drafts(self) -> None:
        """Copy the history of prompts for `save_drafts`. On each attention rank's first card, while no engine runs."""
        assert self.card.drafter is not None, f"rank {self.rank} does not draft"
        self._drafts_to_save = self.card.drafter.texts.history(MAX_TOKENS)

    def save_drafts(self, folder: str) -> None:
        """Write the copy of `snapshot_drafts` to disk, while other stages may run. Raise OSError if that fails."""
        pieces, self._drafts_to_save = self._drafts_to_save, []
        write_history(Path(folder), self.rank, pieces)

    def restore_drafts(self, folder: str) -> None:
        """Load the history of prompts from a folder whose files the caller has verified; nothing if there is none. On
        all cards that generate, so that those with one schedule draft alike. Raise ValueError if a file is damaged."""
        assert self.card.drafter is not None, f"rank {self.rank} does not draft"
        self.card.drafter.texts.load_history(read_history(Path(folder)))

    def close_kv_pool(self) -> None:
        """Remove this card's files from its machine's KV pool. On cards that generate, at the end of the run."""
        if self.card.kv_files is not None:
            self.card.kv_files.close()

    # Control calls: answered while any stage runs, as are `ask_profile` and `status`; on the first card of an engine.

    def submit(self, requests: Sequence[Request]) -> None:
        """Submit further requests to the engine; they start at its next step."""
        self._generation.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests at the engine's next step, with the tokens generated so far; unknown ids are ignored."""
        self._generation.engine.abort(request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Free the parked KV of suspended requests that have been resumed elsewhere."""
        self._generation.engine.forget(request_ids)

    def pause(self) -> None:
        """End `generate` after the engine's next step; unfinished requests are suspended."""
        self._generation.engine.pause()

    def complete(self, ended: Sequence[EndedConversation]) -> None:
        """Put conversations that have ended behind their last turn to the queue as finished samples."""
        self._generation.complete(ended)

    def await_ended_chunks(self, timeout_s: float) -> list[SuspendedSample]:
        """Return the requests of the engine that were suspended at the end of their chunk since the last call; wait
        at most ``timeout_s`` for the first one, and not beyond the end of `generate`."""
        return self._generation.await_suspended(timeout_s)

    @property
    def _trainer(self) -> TrainEngine:
        assert self.card.trainer is not None, f"rank {self.rank} does not train"
        return self.card.trainer

    @property
    def _generation(self) -> EngineStage:
        assert self.card.generation is not None, f"rank {self.rank} does not generate"
        return self.card.generation

    @property
    def _checkpoint_writer(self) -> CheckpointWriter:
        assert self.card.checkpoint_writer is not None, f"rank {self.rank} does not train"
        return self.card.checkpoint_writer

    @contextmanager
    def _in_role(self, stage: str, phase: Phase, mesh: Mesh, weights: AbstractContextManager[None]) -> Iterator[None]:
        """Leave the card's phase, run the block in the ``phase`` of a frozen role with ``weights`` entered, and return;
        all cards of ``mesh`` together. Raise AbortedOnAllRanks on all cards if one fails. If the phase of one does not
        allow the transition, all keep their phase; after a later failure all are BROKEN."""
        phases, home = self.phases, self.phases.phase
        on_all = partial(all_or_none, group=mesh.world_group, rank=self.rank, device=self.card.device)
        on_all(lambda: phases.check(phase), stage="phase")
        phases.begin(phase)
        try:
            with ExitStack() as inside:
                on_all(lambda: inside.enter_context(weights), stage=f"to {phase.value}")
                phases.arrive(phase)
                phases.require(stage)
                yield
                self.card.log.record_memory(phase.value)
                phases.begin(home)
                on_all(inside.close, stage=f"back to {home.value}")
            phases.arrive(home)
        except BaseException:
            phases.arrive(Phase.BROKEN)
            raise


def _first_of_replica(mesh: Mesh) -> bool:
    """Return whether this rank reports for all that compute the same samples."""
    return mesh.first_of_replica and mesh.first_stage
