"""Run the stages of one card, with the roles that its deployment assigns to it. One class for all deployments.

    prepare ─► TRAIN ──switch──► INFER ──switch──► TRAIN …          cards that only generate or score: STANDBY ─► …
                │                  │
                reference, score   generate (control calls meanwhile: submit, abort, …)
                train, snapshot    (save runs on a separate thread in any phase: it writes the copy of snapshot)

A stage is a method that all cards concerned run at once; between two stages a card only copies (the optimizer, to and
from the host). What a card consists of is `Card`; how it changes its phase is in `PhaseSwitcher`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distqueue import PackedBatch
from fusion.colocate.card import Card, load_card
from fusion.colocate.checkpoint_writer import CheckpointWriter
from fusion.colocate.parts import WorkerParts, worker_parts
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.rendezvous import LOOPBACK, Rendezvous, join, rejoin
from fusion.colocate.role_phase import in_role_phase
from fusion.colocate.samples.sequences import (
    REFERENCE,
    response_column,
    summed_log_ratios,
    to_sequences,
    tokens_of_samples,
)
from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageLog, StageReport, wait_kind
from fusion.inference import Request
from fusion.inference.pooled import KVPeers
from fusion.model import Mesh
from fusion.npu import Device, open_device
from fusion.npu.all_or_none import all_or_none
from fusion.npu.failures import CollectiveFailed, clear_frames
from fusion.rollout import SuspendedSample
from fusion.rollout.drafts.history_files import MAX_TOKENS, read_history, write_history
from fusion.rollout.drafts.pieces import Piece
from fusion.rollout.engine_stage import EngineStage
from fusion.rollout.partial_samples import SampleStore
from fusion.training import Sequences, TrainEngine, load_checkpoint
from fusion.training.interface import SKIPPED_IN_A_ROW


class Worker:
    """Stages are methods; all cards they concern run the same stage at once. Arguments and results are plain data.

    Args:
        rank: of this card in the run.
        queue: where samples are read from and written to.
        parts: factories of the card's components; None: chosen by the spec.
        exchange_texts: sends a message to the text store of the run and returns its reply (`TextExchange`); None:
            engines draft from their own text.
        kv_peers: the KV pools of the other machines; None: KV does not travel between machines.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        queue: SampleStore,
        parts: WorkerParts | None = None,
        exchange_texts: Callable[[bytes], bytes] | None = None,
        kv_peers: KVPeers | None = None,
    ):
        self.spec, self.rank, self.queue = spec, rank, queue
        self.phases = PhaseMachine(rank, spec.deployment.roles_of(rank))
        self._parts, self._exchange_texts, self._kv_peers = parts, exchange_texts, kv_peers
        self._card: Card | None = None
        self._drafts_to_save: list[Piece] = []
        self._rendezvous: Rendezvous | None = None
        self._continues = False
        """Whether the next minibatch continues the one that was accumulated last"""

    @property
    def card(self) -> Card:
        """The components that `prepare` has loaded."""
        assert self._card is not None, f"rank {self.rank} is not prepared"
        return self._card

    def rendezvous(self, host: str = LOOPBACK) -> str:
        """Returns the address for `prepare`, of which every card of the run must be told. Called on rank 0.

        Args:
            host: this machine's address that the other cards can reach.
        """
        self._rendezvous = Rendezvous(host)
        return self._rendezvous.address

    def prepare(self, address: str, device: Device | None = None, restart: int = 0) -> str:
        """Opens the card (unless ``device`` is given), joins the other workers at ``address`` (unless they have
        joined), loads what the card's roles need, and returns a description of the device.

        Args:
            restart: number of the restart in the run, from 1, where all cards of an engine take the place of others
                that have ended; `rejoin` must follow. 0: the run starts.
        """
        spec = self.spec
        home = Phase.TRAIN if self.rank in spec.deployment.train else Phase.STANDBY
        self.phases.begin(home)
        # Ray makes only the worker's card visible, as index 0; an emulated card belongs to this process.
        device = device or open_device(
            spec.device.kind, capacity_bytes=spec.device.capacity_bytes, streams=spec.device.streams
        )
        parts = self._parts or worker_parts(spec)
        log = StageLog(self.rank, device, parts.pacer)
        torch.set_num_threads(1)
        if restart and not dist.is_initialized():
            rejoin(address, rank=self.rank, world=spec.world)
        elif spec.world > 1 and not dist.is_initialized():
            backend, opened = device.process_group_backend, self._rendezvous
            join(address, rank=self.rank, world=spec.world, backend=backend, opened=opened)
        with log.work("restart" if restart else "prepare"):
            self._card = load_card(
                spec=spec,
                rank=self.rank,
                phases=self.phases,
                queue=self.queue,
                parts=parts,
                log=log,
                exchange_texts=self._exchange_texts,
                restart=restart,
                kv_peers=self._kv_peers,
            )
        self.phases.arrive(home)
        return device.describe()

    def checksums(self) -> dict[str, dict[str, int]]:
        """Returns checksums of the weights that this card has loaded, by role (`policy`, `reference`, `reward_model`)
        and file."""
        return {"policy": self.card.weights.loaded} | self.card.roles.loaded

    def rejoin(self, restart: int) -> None:
        """Renews the groups in which an engine's cards were that have restarted since. Collective over the cards that
        train or generate, while they do neither.

        Args:
            restart: number of the last restart in the run.
        """
        card = self.card
        with card.log.work("rejoin", "switch"):
            card.meshes.renew_actor(self.spec, restart, card.device.process_group_backend)
            card.weights.renew_groups()

    def recover(self) -> None:
        """Returns a card from a transfer of weights that has failed because another card has died; `rejoin` and another
        transfer must follow. On cards that only train, which have kept their weights, and cards that only generate,
        which receive theirs again."""
        assert not self.spec.deployment.shared, "cards that train and generate have given up their training layout"
        if self.phases.phase is Phase.BROKEN:
            self.phases.arrive(Phase.TRAIN if self.rank in self.spec.deployment.train else Phase.STANDBY)
        if self.card.receiver is not None:
            self.card.receiver.recover()

    def switch(
        self, phase: str, version: int = 0, share: InferenceShare | None = None, while_generating: bool = False
    ) -> StageReport:
        """Switches the card to ``infer`` or to ``train``. Collective over the cards that train or generate.

        Args:
            version: the policy version whose weights the engines receive.
            share: the engines that generate and their resources; None: all, as configured.
            while_generating: cards that only generate keep decoding and call `receive` instead.
        """
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
        """Receives new weights on a card that only generates, while it generates. The other cards call `switch` to
        ``infer`` with ``while_generating``. Runs on a separate thread."""
        assert self.card.receiver is not None, f"rank {self.rank} does not receive weights while it generates"
        with self._leaving_after_failure():
            return self.card.receiver.receive(version, share)

    @contextmanager
    def _leaving_after_failure(self) -> Iterator[None]:
        """Leaves the group of the actor's cards if the block fails and the weights can be sent again: other cards may
        wait for this one in a collective of it."""
        try:
            yield
        except BaseException as error:
            if not self.spec.deployment.shared:
                clear_frames(error)  # the group's connections are closed with the last reference to it
                self.card.weights.renew_groups()
                self.card.meshes.leave_actor()
            raise

    def generate(self, requests: Sequence[Request], stay: bool = True) -> StageReport:
        """Runs this card's engine until `pause` or, unless ``stay``, until it is idle. Collective over the engine.

        Args:
            requests: the first requests; on the engine's first card.

        Returns:
            with the samples that are unfinished at the end (`StageReport.suspended`). Finished ones are put to the
            queue as they end.
        """
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
        """Runs this card's engine until all requests have finished, while it has no others. Collective over the engine.

        Args:
            rows: prefix of the queue's rows into which the answers' tokens are put for scoring; "": they are not stored
                (`EngineStage.answer`).

        Returns:
            with the answers.
        """
        card = self.card
        self.phases.require("generate")
        with self._stage("answer", "gen"):
            answers = self._generation.answer(requests, rows, card.log.timeline)
            card.log.record_memory("infer")
        return card.log.report(answers=answers)

    def reference(self, requested: Sequence[str]) -> StageReport:
        """Adds the column `ref_logprobs` to samples. Collective over the mesh of the reference model.

        Args:
            requested: ids of the samples of this card's replica.

        Returns:
            with algorithm.kl_in=reward the samples' `reference_kl`, from one card of each replica.
        """
        card = self.card
        mesh = card.meshes.reference or card.meshes.train
        assert mesh is not None
        weights = card.roles.reference_in_hbm(card.trainer)
        in_phase = in_role_phase(self.phases, Phase.REFERENCE, mesh=mesh, weights=weights, device=card.device)
        with self._stage("reference", "reference"), in_phase:
            self.phases.require("reference")
            in_reward = self.spec.algorithm.kl_in == "reward"
            delivery = card.reader(
                "reference", requested, mesh, loss_columns=("behaviour_logprobs",) if in_reward else ()
            )
            ids, sequences = delivery.batch.ids, to_sequences(delivery)
            logprobs = card.roles.logprobs(sequences, card.trainer)
            if _first_of_replica(mesh) and ids:
                columns = {REFERENCE: response_column(logprobs, sequences, delivery)}
                self.queue.put(PackedBatch.from_samples(ids, columns))
            card.log.record_memory("reference")
        reports_kl = in_reward and mesh.tp_rank == 0 and mesh.last_stage
        sums = summed_log_ratios(sequences, logprobs) if reports_kl else []
        return card.log.report(reference_kl=dict(zip(ids, sums, strict=False)))

    def score(self, requested: Sequence[str]) -> StageReport:
        """Scores samples of the queue with the reward model, ``requested``: ids of those of this card's replica.
        Collective over its mesh; the first card of a replica reports the outcomes."""
        card = self.card
        mesh = card.meshes.reward_model
        assert mesh is not None
        weights = card.roles.reward_model_in_hbm()
        in_phase = in_role_phase(self.phases, Phase.REWARD, mesh=mesh, weights=weights, device=card.device)
        with self._stage("score", "reward_model"), in_phase:
            self.phases.require("score")
            batch = card.reader("score", requested, mesh).batch
            outcomes = card.roles.scores(tokens_of_samples(batch))
            card.log.record_memory("reward")
        return card.log.report(scores=dict(zip(batch.ids, outcomes, strict=True)) if _first_of_replica(mesh) else {})

    def train(
        self, minibatches: Sequence[Sequence[str]], version: int | None = None, update: bool = True
    ) -> StageReport:
        """Runs one optimizer step per minibatch. Gradients accumulated before count for the first one. Collective over
        the cards that train.

        Args:
            minibatches: ids of the samples of this card's replica, by minibatch.
            version: the policy version before this call; None: the samples' staleness is not reported.
            update: False: only accumulates the gradients of a single minibatch, which the next call continues: the
                loss is then the mean over both.

        Returns:
            with `has_lost`.
        """
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
            weigh = partial(self._weigh, version)
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
        """Copies the trainer's state to host memory for `save`. The previous `save` must have finished."""
        self.phases.require("snapshot")
        with self.card.log.work("snapshot", "save"):
            self._checkpoint_writer.copy(self.card.switcher.training_state())
        return self.card.log.report()

    def save(self, checkpoint: str, export: str) -> None:
        """Writes the copy of `snapshot`: the trainer's state into the folder ``checkpoint`` and the weights into the
        Hugging Face folder ``export``. Other stages may run at the same time. Returns when all cards' files are on
        disk."""
        self._checkpoint_writer.write(checkpoint, export)

    def restore(self, checkpoint: str, steps_left: int | None = None) -> None:
        """Loads the trainer's state from the folder ``checkpoint``, which was saved in any layout and whose files the
        caller has verified. Collective over the cards that train.

        Args:
            steps_left: optimizer steps until the end of the run; None: as configured.

        Raises:
            ValueError: the folder is not a checkpoint, or belongs to another model or dtype.
        """
        self.phases.require("restore")
        with self.card.log.work("restore"):
            self.card.switcher.load_optimizer()
            self.card.switcher.await_optimizer()
            load_checkpoint(self._trainer, checkpoint, verify=False, steps_left=steps_left)

    def snapshot_drafts(self) -> None:
        """Copies the history of prompts for `save_drafts`. On the first card of each attention rank, while no engine
        runs."""
        assert self.card.drafter is not None, f"rank {self.rank} does not draft"
        self._drafts_to_save = self.card.drafter.history(MAX_TOKENS)

    def save_drafts(self, folder: str) -> None:
        """Writes the copy of `snapshot_drafts`. Other stages may run at the same time. Returns when it is on disk.

        Raises:
            OSError: it could not be written.
        """
        pieces, self._drafts_to_save = self._drafts_to_save, []
        write_history(Path(folder), self.rank, pieces)

    def restore_drafts(self, folder: str) -> None:
        """Loads the history of prompts from a folder whose files the caller has verified; nothing if there is none. On
        all cards that generate, so that those with one schedule draft alike.

        Raises:
            ValueError: a file is damaged.
        """
        assert self.card.drafter is not None, f"rank {self.rank} does not draft"
        self.card.drafter.load_history(read_history(Path(folder)))

    def close_kv_pool(self) -> None:
        """Removes this card's files from the KV pool of its machine. On the cards that generate, at the end of the
        run."""
        if self.card.kv_files is not None:
            self.card.kv_files.close()

    def begin_profile(self, folder: str, step: int) -> None:
        """Profiles the stages of this card up to `end_profile`; the trace is named by step and card. A stage that fails
        ends and writes it, too. On cards whose stages end with the step: those that train."""
        self.card.log.begin_profile(Path(folder) / f"step-{step}-card-{self.rank}")

    def end_profile(self) -> None:
        """Writes the trace that was begun, unless it is written."""
        self.card.log.end_profile()

    # Control calls: answered while any stage runs. All except the first two are for the first card of an engine.

    def ask_profile(self, folder: str, step: int | None) -> None:
        """Has the stages of this card profiled as by `begin_profile`, or ends that (None): between two steps of its
        engine, or at the beginning or the end of a stage. On cards whose stages may last longer than a step."""
        path = None if step is None else Path(folder) / f"step-{step}-card-{self.rank}"
        self.card.log.ask_profile(path)

    def status(self) -> dict[str, Any]:
        """Reports rank, process id, phase and stage, and on a card that generates `InferEngine.status`."""
        card = self._card
        status = {"rank": self.rank, "pid": os.getpid(), "phase": self.phases.phase.value}
        status["stage"] = card.log.stage_name if card is not None else "start"
        return status | (card.engine.status() if card is not None and card.engine is not None else {})

    def submit(self, requests: Sequence[Request]) -> None:
        """Submits further requests to the engine; they start at its next step."""
        self._generation.submit(requests)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Aborts requests at the engine's next step, with the tokens generated so far; unknown ids are ignored."""
        self._generation.engine.abort(request_ids)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Frees the parked KV of suspended requests that have been resumed elsewhere."""
        self._generation.engine.forget(request_ids)

    def pause(self) -> None:
        """Ends `generate` after the engine's next step; unfinished requests are suspended."""
        self._generation.engine.pause()

    def await_ended_chunks(self, timeout_s: float) -> list[SuspendedSample]:
        """Returns the requests of the engine that were suspended at the end of their chunk since the last call; waits
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

    def _stage(self, name: str, kind: str) -> AbstractContextManager[None]:
        trains = self.rank in self.spec.deployment.train
        return self.card.log.stage(name, kind, wait_kind(name, self.phases.phase, trains))

    def _weigh(self, version: int | None, sequences: Sequences) -> Sequences:
        return replace(self.card.algorithm.weigh(sequences), version=version)


def _first_of_replica(mesh: Mesh) -> bool:
    """Whether this rank reports for all that compute the same samples."""
    return mesh.tp_rank == 0 and mesh.first_stage
