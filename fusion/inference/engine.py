"""Generate on one TP/EP group, whose ranks step together.

    submit, abort ─► control channel ─► place ─► scheduler of each attention rank ─► forward ─► sample ─► outputs
                     (any thread)       (same on every rank)      │                   ▲
                                                                 └─ blocks ─► paged KV

An attention rank (one DP coordinate; all its TP ranks compute the same) owns requests and their KV. Its schedule
depends only on its own requests; each step the ranks exchange one row of counters. An idle rank still steps if tokens
are exchanged between experts (a dummy step, counted). Pipeline stages have the same schedule: each sends its hidden
states to the next, and the last one samples and broadcasts the tokens. One batch is in flight at a time, so stages wait
for each other: use PP only for models that do not fit otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import isnan
from typing import TYPE_CHECKING

from fusion.inference.blocks import BlockManager
from fusion.inference.config import RolloutConfig
from fusion.inference.control import Orders
from fusion.inference.controlled import ControlledEngine
from fusion.inference.counters import NO_COST, RankState
from fusion.inference.forward import Forward
from fusion.inference.interface import InferEngine
from fusion.inference.kv_cache import KVCache, count_blocks
from fusion.inference.kv_layout import KVLayout
from fusion.inference.parked import HostMemory, ParkedKV, max_parked_blocks
from fusion.inference.placement import place
from fusion.inference.pooled import KVStore, PooledKV
from fusion.inference.request import Output, Request, SamplingParams
from fusion.inference.routing import RoutingCache
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import Sequence, Step
from fusion.inference.stop_strings import StopStrings
from fusion.inference.validation import check_fits
from fusion.inference.verification import Drafter, StepCost
from fusion.model import Mesh, Transformer
from fusion.npu import Device


class EmbeddedEngine(ControlledEngine):
    """The embedded `InferEngine`, whose docstrings specify the methods. Construction is collective.

    Args:
        model: holds the weights; they may be changed between steps (then set `policy_version`).
        config: with `suspended_kv` = keep, unfinished requests keep their KV when weights change, and during `suspend`
            and `release_kv` if there is host ``memory`` to park it.
        seed: seed of the run; with a request's id and a token's position it determines the sample.
        routing: whether outputs record the experts of their tokens; the model must have experts.
        memory: host memory in which KV is parked; None: KV is not parked.
        kv_store: with `suspended_kv` = pool, where it is parked instead; None: this rank parks none.
        stop_strings: end a response with the token that completes one of them; the same on all ranks.
        drafter: proposes what running sequences continue with; None: each decodes one token a step.
    """

    def __init__(
        self,
        model: Transformer,
        mesh: Mesh,
        device: Device,
        config: RolloutConfig,
        seed: int = 0,
        routing: bool = False,
        memory: HostMemory | None = None,
        stop_strings: StopStrings | None = None,
        drafter: Drafter | None = None,
        kv_store: KVStore | None = None,
    ):
        config.validate()
        super().__init__(mesh)
        if config.batch_invariant and model.row_multiple == 1:
            raise ValueError("rollout.batch_invariant=true: the model must be built with batch_invariant=True")
        self.model, self.device, self.config = model, device, config
        shape = model.config
        layers = len(mesh.parallel.layers(shape.num_layers, mesh.pp_rank))
        self.cache = KVCache(
            KVLayout.of(shape.attention, mesh.parallel.tp),
            layers=layers,
            block_size=config.block_size,
            device=device,
            dtype=model.weights.dtype,
        )
        self.max_length = min(config.max_length or shape.max_positions, shape.max_positions)
        self.scheduler = Scheduler(
            BlockManager(0, config.block_size),
            max_seqs=config.max_seqs,
            max_batch_tokens=config.max_batch_tokens,
            prefix_cache=config.prefix_cache,
            counters=self.counters,
        )
        self.scheduler.stop_strings, self.scheduler.drafter = stop_strings, drafter
        assert not routing or shape.num_experts, "a model without experts has no routing"
        self.routing = RoutingCache(shape, config.block_size) if routing else None
        if self.routing and self._reports:
            self.scheduler.routing = self.routing
        max_layers = max(len(mesh.parallel.layers(shape.num_layers, stage)) for stage in range(mesh.parallel.pp))
        own_routing, limit = self.routing if self._reports else None, max_parked_blocks(config, self.cache, max_layers)
        self.pooled: PooledKV | None = None
        if config.pools_kv and memory is not None:
            self.pooled = PooledKV(
                memory,
                self.cache,
                mesh,
                store=kv_store,
                routing=own_routing,
                max_blocks=limit,
                charged_block_bytes=self.cache.block_bytes // layers * max_layers,
                names_blocks=config.prefix_cache,
                counters=self.counters,
            )
            self.shares_kv = True
        self.parked = parked = self.pooled or ParkedKV(memory, self.cache, routing=own_routing, max_blocks=limit)
        # Without a reference to self: a reference cycle would keep KV alive.
        self.scheduler.on_chunk_end = lambda seq: parked.park([seq])
        self.forward = Forward(
            model=model,
            mesh=mesh,
            device=device,
            cache=self.cache,
            parked=self.parked,
            routing=self.routing,
            seed=seed,
            batch_invariant=config.batch_invariant,
            max_rows=config.max_seqs,
        )
        self.on_adopt: Callable[[int], None] = lambda version: None
        self.last_step_kind = ""
        self._step_cost = NO_COST
        """Of the last step"""
        self._interned: dict[SamplingParams, SamplingParams] = {}

    @property
    def parked_kv_bytes(self) -> int:
        return self.parked.host_bytes

    # Memory and weights

    def allocate_kv(self) -> None:
        """Allocate ``kv_fraction`` of the device's free memory, at most ``max_kv_tokens``; all blocks are empty.

        Raises:
            ValueError: as `InferEngine.allocate_kv`.
        """
        config = self.config
        bytes_free = self.device.memory().free
        blocks, workspace = count_blocks(self.cache, config, max_length=self.max_length, bytes_free=bytes_free)
        blocks = self.control.min_over_ranks(blocks)
        if blocks < 1:
            raise ValueError(
                f"rollout.kv_fraction={config.kv_fraction} (max_kv_tokens={config.max_kv_tokens}): the KV cache gets "
                f"no block of {config.block_size} tokens ({self.cache.block_bytes} bytes; {bytes_free} bytes are free)"
            )
        self.capacity_tokens = blocks * config.block_size
        for seq in (*self.scheduler.running, *self.scheduler.waiting):
            check_fits(seq.request, self.max_length, self.capacity_tokens)
        self.cache.allocate(blocks, workspace)
        if self.routing and self._reports:
            self.routing.allocate(blocks)
        self.scheduler.restart(BlockManager(blocks, config.block_size))

    def reconfigure(self, config: RolloutConfig) -> None:
        assert not self.cache.pools, "release_kv comes before reconfigure"
        config.validate()
        self.config = config
        self.scheduler.max_seqs, self.scheduler.max_batch_tokens = config.max_seqs, config.max_batch_tokens
        self.forward.draw.max_rows = config.max_seqs

    def release_kv(self) -> None:
        if self.config.keeps_kv:
            self.parked.park(self.scheduler.running)
        self.parked.settle()
        self.scheduler.restart(BlockManager(0, self.config.block_size))
        self.cache.release()
        if self.routing:
            self.routing.allocate(0)

    @property
    def policy_version(self) -> int:
        return self.scheduler.version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        # With rollout.suspended_kv=keep running requests continue on their KV, which no other request can use.
        if version == self.scheduler.version:
            return
        if self.scheduler.drafter is not None:
            self.scheduler.drafter.adopt(version)
        if self.config.keeps_kv:
            self.scheduler.change_version(version)
        else:
            if self.pooled is not None:
                self.pooled.clear()
            self.scheduler.restart(version=version)
            self.cache.invalidate()

    # Generation

    def step(self) -> list[Output]:
        """Compute one step; return outputs on the first TP rank and stage of the attention rank that owns them."""
        began = time.perf_counter()
        outputs, self.last_step_kind = self._take_orders(), ""
        self._observe_cost()
        if not self._idle:
            assert self.cache.pools, "there are unfinished requests, but no KV cache: allocate_kv comes before step"
            accepted = self.counters.accepted_tokens
            step, computing = self.scheduler.schedule(), time.perf_counter()
            assert step or not self.scheduler.unfinished
            self.last_step_kind = step.kind
            if step or self.mesh.ep_group is not None:
                outputs += self._compute(step)
            seconds = time.perf_counter() - began
            if self.pooled is not None:
                self.pooled.observe_step(step, time.perf_counter() - computing)
            self._busy_s += seconds
            if step and self.scheduler.drafter is not None:
                self._step_cost = StepCost(
                    len(step.decodes),
                    len(step.verified),
                    tokens=sum(len(one) - 1 for one in step.verified),
                    seconds=seconds,
                    accepted=self.counters.accepted_tokens - accepted,
                    drafting_s=self.scheduler.drafter.take_seconds(),
                    prefills=bool(step.chunks),
                )
        return outputs if self._reports else []

    def suspend(self) -> list[Output]:
        outputs = self._apply_orders(self._exchange())
        if self.pooled is not None:
            self.pooled.suspend(self.scheduler.running, self.scheduler.waiting)
        else:
            self.parked.park(self.scheduler.running)
        suspended = self.scheduler.abort(lambda request: True)
        for output in suspended:
            self._locate_kv(output, kept=output.request_id in self.parked)
        outputs += suspended
        self._exchange()
        self._idle = True
        return outputs if self._reports else []

    @property
    def _reports(self) -> bool:
        """Whether this rank returns outputs and counts requests for all ranks with the same schedule."""
        return self.mesh.tp_rank == 0 and self.mesh.first_stage

    def _observe_cost(self) -> None:
        """Report to the drafter what the leader's last step has cost: the same figures on every rank, which have to
        draft alike."""
        cost, self._step_cost = self.control.states.leader_cost(), NO_COST
        if self.scheduler.drafter is not None and cost.seconds:
            self.scheduler.drafter.observe_step(cost)

    def _take_orders(self) -> list[Output]:
        drafter = self.scheduler.drafter
        drafts_update = drafter.drafts_update() if drafter is not None and self._reports else b""
        orders = self._exchange(len(drafts_update))
        if drafter is not None and (drafts_update := self.control.spread(drafts_update)):
            drafter.read(drafts_update)
        outputs = self._apply_orders(orders) if orders else []
        self._idle = not self.control.states.unfinished.any() and not orders
        return outputs

    def _apply_orders(self, orders: Orders) -> list[Output]:
        parallel = self.mesh.parallel
        self.parked.forget(orders.forget)
        loads = self.control.states.unfinished[: parallel.stage_world : parallel.tp].tolist()
        placed = zip(orders.submit, place(loads, orders.submit), strict=True)
        own = {request.id: self._sequence(request) for request, rank in placed if rank == self.mesh.dp_rank}
        if self.pooled is not None:
            agree = self.control.each_min_over_ranks
            self.pooled.fetch(orders.submit, own, version=self.policy_version, agree=agree)
        for seq in own.values():
            self.scheduler.add(seq)
        self.paused |= orders.pause
        if orders.version is not None:
            self._adopt(orders.version)
        ids = set(orders.abort)
        if not (ids or orders.abort_all):
            return []
        ended = self.scheduler.abort(lambda request: orders.abort_all or request.id in ids)
        self.parked.abandon(output.request_id for output in ended)
        return ended

    def _adopt(self, version: int) -> None:
        if not self.config.keeps_kv:
            running = self.scheduler.running
            self.counters.interrupted += sum(len(seq.tokens) > len(seq.request.prompt) for seq in running)
        self.on_adopt(version)
        self.policy_version = version

    def _sequence(self, request: Request) -> Sequence:
        # Equal parameters are one object, so that the sampler can detect by identity that a batch has only one kind.
        params = self._interned.setdefault(request.params, request.params)
        seq = Sequence.of(request, params, self.model.config.eos_token_ids)
        self.parked.claim(seq)
        return seq

    def _compute(self, step: Step) -> list[Output]:
        self.counters.dummy_steps += not step
        self.cache.clean(self.scheduler.blocks.highest)
        sampled = self.forward(step)
        if isnan(sum(sampled.logprobs)):
            seq = next(seq for seq, logprob in zip(step.drawn, sampled.logprobs, strict=True) if isnan(logprob))
            raise FloatingPointError(f"request {seq.request.id!r}: the logits of policy {self.policy_version} are NaN")
        outputs = self.scheduler.commit(step, *sampled)
        for output in outputs:
            kept = output.request_id in self.parked or self.config.prefix_cache
            self._locate_kv(output, kept=kept and output.finish_reason == "chunk")
        return outputs

    def _locate_kv(self, output: Output, *, kept: bool) -> None:
        output.kv_rank = self.mesh.dp_rank if kept else None
        if kept and self.pooled is not None:
            output.kv_tokens = self.pooled.computed(output.request_id)

    def _exchange(self, update_bytes: int = 0) -> Orders:
        """Send this rank's state to the others; return this step's orders."""
        scheduler, state = self.scheduler, RankState()
        if self._reports:
            state = RankState(
                len(scheduler.waiting), len(scheduler.running), update_bytes, self._step_cost, self.counters
            )
        return self.control.exchange(state)


if TYPE_CHECKING:

    def _satisfies_interface(engine: EmbeddedEngine) -> InferEngine:
        return engine
