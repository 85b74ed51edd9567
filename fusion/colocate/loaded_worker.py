"""Load what a worker's card consists of, and describe what it does: the part of a `Worker` that all deployments share.

rendezvous (rank 0) ─ address ─► prepare: open the card, join the other workers, load the roles ─► LoadedCard
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distqueue import SampleQueue
from fusion.colocate.card import LoadedCard
from fusion.colocate.groups import raise_file_limit
from fusion.colocate.parts import WorkerParts, worker_parts
from fusion.colocate.phases import Phase, PhaseMachine
from fusion.colocate.rendezvous import LOOPBACK, Rendezvous, join
from fusion.colocate.spec import WorkerSpec
from fusion.colocate.stages import StageLog, wait_kind
from fusion.inference.pooled import KVPeers
from fusion.npu import Device, open_device
from fusion.rollout.drafts.pieces import TextPiece


class LoadedWorker:
    """Join the other workers of a run and load the components of its card. ``rank``: of this card in the run;
    ``queue``: where samples are read from and written to; ``parts``: factories of the card's components; None: chosen
    by the spec; ``exchange_texts``: sends a message to the text store of the run and returns its reply
    (`TextExchange`); None: engines draft from their own text; ``kv_peers``: the KV pools of the other machines; None:
    KV does not travel between machines."""

    def __init__(
        self,
        spec: WorkerSpec,
        rank: int,
        queue: SampleQueue,
        parts: WorkerParts | None = None,
        exchange_texts: Callable[[bytes], bytes] | None = None,
        kv_peers: KVPeers | None = None,
    ):
        self.spec, self.rank, self.queue = spec, rank, queue
        self.phases = PhaseMachine(rank, spec.deployment.roles_of(rank))
        self._parts, self._exchange_texts, self._kv_peers = parts, exchange_texts, kv_peers
        self._card: LoadedCard | None = None
        self._rendezvous: Rendezvous | None = None
        self._continues = False
        """Whether the next minibatch continues the one that was accumulated last"""
        self._drafts_to_save: list[TextPiece] = []
        """Copy of the history of prompts that is to be saved"""

    @property
    def card(self) -> LoadedCard:
        assert self._card is not None, f"rank {self.rank} is not prepared"
        return self._card

    def rendezvous(self, host: str = LOOPBACK) -> str:
        """Return the address for `prepare`, of which every card of the run must be told. Called on rank 0. ``host``:
        this machine's address that the other cards can reach."""
        self._rendezvous = Rendezvous(host)
        return self._rendezvous.address

    def prepare(self, address: str, device: Device | None = None, restart: int = 0) -> str:
        """Open the card (unless ``device`` is given), join the other workers at ``address`` (unless they have joined),
        load what the card's roles need, and return a description of the device. ``restart``: number of the restart in
        the run, from 1, where all cards of an engine replace ended ones; `rejoin` must follow; 0: the run starts."""
        spec = self.spec
        home = Phase.TRAIN if self.rank in spec.deployment.train else Phase.STANDBY
        self.phases.begin(home)
        # Ray makes only the worker's card visible, as index 0; an emulated card belongs to this process.
        wanted = spec.device
        device = device or open_device(
            wanted.kind,
            capacity_bytes=wanted.capacity_bytes,
            streams=wanted.streams,
            operators=wanted.operators,
            deterministic=wanted.deterministic,
            rates=(wanted.host_bytes_per_s, wanted.wire_bytes_per_s),
        )
        parts = self._parts or worker_parts(spec)
        log = StageLog(self.rank, device, parts.pacer)
        torch.set_num_threads(1)
        if spec.world > 1 and not dist.is_initialized():
            raise_file_limit(spec)
            join(address, rank=self.rank, world=spec.world, opened=self._rendezvous)
        with log.work("restart" if restart else "prepare"):
            self._card = LoadedCard(
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
        """Return checksums of this card's loaded weights by role (`policy`, `reference`, `reward_model`) and file."""
        return {"policy": self.card.weights.loaded} | self.card.roles.loaded

    def begin_profile(self, folder: str, step: int) -> None:
        """Profile the stages of this card up to `end_profile`; the trace is named by step and card. A stage that fails
        ends and writes it, too. On cards whose stages end with the step: those that train."""
        self.card.log.begin_profile(Path(folder) / f"step-{step}-card-{self.rank}")

    def end_profile(self) -> None:
        """Write the trace that was begun, unless it is written."""
        self.card.log.end_profile()

    def ask_profile(self, folder: str, step: int | None) -> None:
        """Have the stages of this card profiled as by `begin_profile`, or end that (None): between two steps of its
        engine, or at the beginning or the end of a stage. On cards whose stages may last longer than a step."""
        path = None if step is None else Path(folder) / f"step-{step}-card-{self.rank}"
        self.card.log.ask_profile(path)

    def status(self) -> dict[str, Any]:
        """Report rank, process id, phase and stage, and on a card that generates `InferEngine.status`."""
        card = self._card
        status = {"rank": self.rank, "pid": os.getpid(), "phase": self.phases.phase.value}
        status["stage"] = card.log.stage_name if card is not None else "start"
        return status | (card.engine.status() if card is not None and card.engine is not None else {})

    def _stage(self, name: str, kind: str) -> AbstractContextManager[None]:
        trains = self.rank in self.spec.deployment.train
        return self.card.log.stage(name, kind, wait_kind(name, self.phases.phase, trains))
