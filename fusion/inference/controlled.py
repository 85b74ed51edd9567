"""Define what every engine does, whatever computes its steps: control calls, orders of a step, size of the KV cache.

submit, abort, … (any thread of the leader) ─► control channel ─► orders of a step, the same on every rank
    ─► placed, aborted, adopted here ─► `_add`, `_abort`, `_compute_step` of a subclass
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from fusion.inference.config import RolloutConfig
from fusion.inference.control import ControlChannel, Orders
from fusion.inference.counters import Counters, RankState
from fusion.inference.placement import place, shares_prompt
from fusion.inference.request import Output, Request, SamplingParams
from fusion.inference.sequence import Sequence
from fusion.inference.validation import check_distinct, check_fits, checked_ids, checked_requests, checked_version
from fusion.inference.verification import Drafter
from fusion.inference.waiting import WaitingLine
from fusion.model import Mesh, WeightHolder
from fusion.npu import Device
from fusion.telemetry.keys import as_yaml


class ControlledEngine(ABC):
    """Send control calls from any thread of the leader, apply them at a step, and report the metrics of all ranks.
    `InferEngine` specifies the methods; a subclass defines the abstract ones. ``max_length``: of prompt and response in
    total. ``capacity_tokens``: capacity of an attention rank's KV cache in tokens, at the last allocation.
    ``uncounted``: what the names of `Counters` begin with that say nothing of this engine."""

    def __init__(self, model: WeightHolder, mesh: Mesh, device: Device, config: RolloutConfig):
        config.validate()
        self.mesh, self.device, self.config = mesh, device, config
        self.control, self.counters = ControlChannel(mesh), Counters()
        self.max_length = config.length_limit(model.config.max_positions)
        self.capacity_tokens = self._version = 0
        self.paused = self._holds_kv = False
        self.uncounted: tuple[str, ...] = ("kv_pool_", "graph")
        self.on_adopt: Callable[[int], None] = lambda version: None
        self.last_step_kind = ""
        self._vocabulary, self._eos_token_ids = model.config.vocab_size, model.config.eos_token_ids
        self._interned: dict[SamplingParams, SamplingParams] = {}
        self._idle = True
        self._busy_s = 0.0
        """Seconds of all steps in which there was something to compute"""

    # What a subclass defines

    @property
    @abstractmethod
    def _drafter(self) -> Drafter | None:
        """What proposes how running sequences continue; None: each decodes one token a step."""

    @abstractmethod
    def _follow_weights(self, version: int) -> None:
        """Drop or keep KV, as the weights are those of another policy."""

    @abstractmethod
    def _kv_bytes(self) -> tuple[int, int]:
        """Return the bytes of a block of the KV cache over all layers of this rank, and those besides its blocks."""

    @property
    def _block_tokens(self) -> int:
        return self.config.engine.block_size

    @abstractmethod
    def _allocate(self, blocks: int) -> None:
        """Allocate a KV cache of this size."""

    @abstractmethod
    def _sequences(self) -> tuple[Collection[Sequence], Collection[Sequence] | WaitingLine[Sequence]]:
        """Return the running and the waiting requests of this attention rank."""

    @abstractmethod
    def _add(self, sequences: Mapping[str, Sequence], orders: Orders) -> None:
        """Free parked KV as ordered, then add the new requests of this attention rank, by id."""

    @abstractmethod
    def _abort(self, chosen: Callable[[Request], bool]) -> list[Output]:
        """End the requests of this attention rank for which ``chosen`` holds; return their outputs."""

    @abstractmethod
    def _compute_step(self) -> list[Output]:
        """Compute a step; return the requests that ended."""

    # Control calls

    @property
    def is_leader(self) -> bool:
        return self.mesh.rank == 0

    @property
    def num_ranks(self) -> int:
        return self.mesh.parallel.world

    def submit(self, requests: Iterable[Request]) -> None:
        assert self.capacity_tokens, "allocate_kv comes before the first submit"
        requests = checked_requests(requests, self._vocabulary)
        check_distinct(requests)
        for request in requests:
            check_fits(request, self.max_length, self.capacity_tokens)
        self._order(submit=requests)

    def abort(self, ids: Iterable[str] | None = None) -> None:
        self._order(**({"abort_all": True} if ids is None else {"abort": checked_ids(ids)}))

    def forget(self, ids: Iterable[str]) -> None:
        """Free parked KV, if there is any, before the requests of later `submit` calls are placed."""
        self._order(forget=checked_ids(ids))

    def pause(self) -> None:
        self._order(pause=True)

    def adopt(self, version: int) -> None:
        self._order(version=checked_version(version))

    def _order(self, **calls: Any) -> None:
        assert self.is_leader, f"control calls go to rank 0 of the engine: {', '.join(calls)}"
        self.control.inbox.add(**calls)

    def report(self, items: Iterable[Mapping[str, Any]]) -> None:
        self.control.inbox.report(items)

    def take_reports(self) -> list[dict[str, Any]]:
        assert self.is_leader, "reports arrive on rank 0 of the engine"
        return self.control.inbox.take_reports()

    def resume(self) -> None:
        self.paused = False

    def status(self) -> dict[str, float]:
        states = self.control.states
        totals = states.totals()
        return {
            "depth": states.waiting + len(self.control.inbox),
            "running": states.running,
            **{name: total for name, total in totals.items() if not name.startswith(self.uncounted)},
            "tokens_per_s": totals["generated_tokens"] / self._busy_s if self._busy_s else 0.0,
            "policy_version": self.policy_version,
            "kv_tokens": self.capacity_tokens,
        }

    # Memory and weights

    @property
    def policy_version(self) -> int:
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        if version != self._version:
            self._version = version
            if self._drafter is not None:
                self._drafter.adopt(version)
            self._follow_weights(version)

    def allocate_kv(self) -> None:
        """Allocate ``kv_fraction`` of the device's free memory, at most ``max_kv_tokens`` and what ``max_seqs``
        sequences of the maximum length need; all blocks are empty.
        Raise ValueError: as `InferEngine.allocate_kv`."""
        limits, bytes_free, block_tokens = self.config.engine, self.device.memory().free, self._block_tokens
        block_bytes, reserved_bytes = self._kv_bytes()
        blocks = (int(bytes_free * limits.kv_fraction) - reserved_bytes) // block_bytes
        blocks = min(blocks, limits.max_seqs * -(-self.max_length // block_tokens))
        if limits.max_kv_tokens is not None:
            blocks = min(blocks, limits.max_kv_tokens // block_tokens)
        (blocks,) = self.control.min_over_ranks([blocks])
        if blocks < 1:
            raise ValueError(
                f"rollout.engine.kv_fraction={limits.kv_fraction} (max_kv_tokens={as_yaml(limits.max_kv_tokens)}): the "
                f"KV cache gets no block of {block_tokens} tokens ({block_bytes} bytes; {bytes_free} bytes are free)"
            )
        self.capacity_tokens = blocks * block_tokens
        for seq in chain(*self._sequences()):
            check_fits(seq.request, self.max_length, self.capacity_tokens)
        self._allocate(blocks)
        self._holds_kv = True

    def reconfigure(self, config: RolloutConfig) -> None:
        assert not self._holds_kv, "release_kv comes before reconfigure"
        config.validate()
        self.config = config

    # Generation

    @property
    def idle(self) -> bool:
        return self._idle

    def step(self) -> list[Output]:
        """Compute one step; return outputs on the first TP rank and stage of the attention rank that owns them."""
        began_s = time.perf_counter()
        outputs, self.last_step_kind = self._take_orders(), ""
        if not self._idle:
            assert self._holds_kv, "there are unfinished requests, but no KV cache: allocate_kv comes before step"
            outputs += self._compute_step()
            self._busy_s += time.perf_counter() - began_s
        return outputs if self._reports else []

    def run(self) -> list[Output]:
        """Step until the engine is idle; return all outputs. Collective."""
        outputs = self.step()
        while not self._idle:
            outputs += self.step()
        return outputs

    def suspend(self) -> list[Output]:
        outputs = self._apply_orders(self._exchange())
        outputs += self._suspend()
        self._exchange()
        self._idle = True
        return outputs if self._reports else []

    def _suspend(self) -> list[Output]:
        return self._abort(lambda request: True)

    @property
    def _reports(self) -> bool:
        """Whether this rank returns outputs and counts requests for all ranks with the same schedule."""
        return self.mesh.tp_rank == 0 and self.mesh.first_stage

    def _exchange(self, update_bytes: int = 0) -> Orders:
        """Send this rank's state to the others; return this step's orders."""
        state = RankState()
        if self._reports:
            running, waiting = self._sequences()
            state = RankState(len(waiting), len(running), update_bytes, self.counters)
        return self.control.exchange(state)

    def _next_orders(self) -> Orders:
        drafter = self._drafter
        if drafter is None:
            return self._exchange()
        update = drafter.drafts_update() if self._reports else b""
        orders = self._exchange(len(update))
        if update := self.control.spread(update):
            drafter.read(update)
        return orders

    def _take_orders(self) -> list[Output]:
        """Exchange and apply the orders of a step; return the outputs of aborted requests."""
        orders = self._next_orders()
        self._idle = not self.control.states.unfinished.any() and not orders
        return self._apply_orders(orders)

    def _apply_orders(self, orders: Orders) -> list[Output]:
        if not orders:
            return []
        parallel = self.mesh.parallel
        loads = self.control.states.unfinished[: parallel.stage_world : parallel.tp].tolist()
        shares = [
            shares_prompt(len(one.prompt), one.params.max_tokens, placed_again=one.turns or one.chunk_tokens > 0)
            for one in orders.submit
        ]
        placed = zip(orders.submit, place(loads, orders.submit, shares), strict=True)
        own = {request.id: self._sequence(request) for request, rank in placed if rank == self.mesh.dp_rank}
        self._add(own, orders)
        self.paused |= orders.pause
        if orders.version is not None:
            self._adopt(orders.version)
        ids = set(orders.abort)
        if not (ids or orders.abort_all):
            return []
        return self._abort(lambda request: orders.abort_all or request.id in ids)

    def _sequence(self, request: Request) -> Sequence:
        # Equal parameters are one object, so that the sampler can detect by identity that a batch has only one kind.
        params = self._interned.setdefault(request.params, request.params)
        return Sequence.of(request, params, self._eos_token_ids)

    def _adopt(self, version: int) -> None:
        if not self.config.kv_pool.keeps_kv:
            self.counters.interrupted += sum(len(seq.tokens) > seq.first_token for seq in self._sequences()[0])
        self.on_adopt(version)
        self.policy_version = version
