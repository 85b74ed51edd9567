"""Generate on one TP/EP group, whose ranks step together.

    submit, abort ─► control channel ─► place ─► scheduler of each attention rank ─► forward ─► sample ─► outputs
                     (any thread)       (same on every rank)      │                   ▲
                                                                 └─ blocks ─► paged KV

An attention rank (one DP coordinate; all its TP ranks compute the same) owns requests and their KV. Its schedule
depends only on its own requests; each step the ranks exchange one row of counters. An idle rank still steps if tokens
are exchanged between experts (a dummy step, counted). Pipeline stages have the same schedule: each sends its hidden
states to the next, and the last one samples and broadcasts the tokens. One batch is in flight at a time, so stages wait
for each other: use PP only for models that do not fit otherwise."""

import time
from collections.abc import Callable, Collection, Mapping
from math import isnan

from fusion.inference.blocks import BlockManager
from fusion.inference.config import RolloutConfig, check_context
from fusion.inference.context import Context
from fusion.inference.control import Orders
from fusion.inference.controlled import ControlledEngine
from fusion.inference.forward import Forward
from fusion.inference.graphs import DecodeGraphs
from fusion.inference.kv_cache import KVCache
from fusion.inference.kv_layout import KVLayout
from fusion.inference.parked import HostMemory, ParkedKV, max_parked_blocks
from fusion.inference.pooled import KVStore
from fusion.inference.pooled_prompts import PooledPrompts
from fusion.inference.request import CONTINUED, Output, Request
from fusion.inference.routing import RoutingCache
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import EngineStep, Sequence
from fusion.inference.stop_strings import StopStrings
from fusion.inference.verification import Drafter
from fusion.inference.waiting import WaitingLine
from fusion.model import Mesh, Transformer
from fusion.npu import Device


class EmbeddedEngine(ControlledEngine):
    """The embedded `InferEngine`, whose docstrings specify the methods. Construction is collective.
    ``model``: holds the weights; they may be changed between steps (then set `policy_version`).
    ``config``: with `kv_pool.suspended` = keep, unfinished requests keep their KV when weights change, and during
        `suspend` and `release_kv` if there is host ``memory`` to park it.
    ``seed``: seed of the run; with a request's id and a token's position it determines the sample.
    ``routing``: whether outputs record the experts of their tokens; the model must have experts.
    ``memory``: host memory in which KV is parked; None: KV is not parked.
    ``kv_store``: with `kv_pool.suspended` = pool, where it is parked instead; None: this rank parks none.
    ``stop_strings``: end a response with the token that completes one of them; the same on all ranks.
    ``drafter``: proposes what running sequences continue with; None: each decodes one token a step."""

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
        super().__init__(model, mesh, device, config)
        if config.engine.batch_invariant and model.row_multiple == 1:
            raise ValueError("rollout.engine.batch_invariant=true: the model must be built with batch_invariant=True")
        check_context(config, mesh.parallel.dcp)
        self.model = model
        shape = model.config
        layers = len(mesh.parallel.layers(shape.num_layers, mesh.pp_rank))
        self.cache = KVCache(
            KVLayout.of(shape.attention, mesh.parallel.tp),
            layers=layers,
            block_size=config.engine.block_size,
            context=Context.of(mesh, config.engine.block_size),
            device=device,
            dtype=model.weights.dtype,
        )
        if config.engine.batch_invariant and device.kind in ("cuda", "npu") and not self.cache.reads_blocks:
            raise ValueError(
                f"rollout.engine.batch_invariant=true: the operators {device.operators.name!r} of this card are"
                " not known to add in a fixed order; expected device.operators=auto (on CUDA, torch 2.13 or newer)"
            )
        self.scheduler = Scheduler(
            BlockManager(0, config.engine.block_size),
            max_seqs=config.engine.max_seqs,
            max_batch_tokens=config.engine.max_batch_tokens,
            prefix_cache=config.engine.prefix_cache,
            counters=self.counters,
        )
        self.scheduler.stop_strings, self.scheduler.drafter = stop_strings, drafter
        assert not routing or shape.num_experts, "a model without experts has no routing"
        self.routing = RoutingCache(shape, config.engine.block_size) if routing else None
        if self.routing and self._reports:
            self.scheduler.routing = self.routing
        max_layers = max(len(mesh.parallel.layers(shape.num_layers, stage)) for stage in range(mesh.parallel.pp))
        own_routing = self.routing if self._reports else None
        limit = max_parked_blocks(config.kv_pool, self.cache, max_layers)
        self.pooled: PooledPrompts | None = None
        if config.kv_pool.pools_kv and memory is not None:
            self.pooled = PooledPrompts(
                memory,
                self.cache,
                mesh,
                store=kv_store,
                routing=own_routing,
                max_blocks=limit,
                charged_block_bytes=self.cache.block_bytes // layers * max_layers,
                names_blocks=config.engine.prefix_cache,
                counters=self.counters,
                pull_tokens=config.kv_pool.pull_tokens,
            )
        self.parked = parked = self.pooled or ParkedKV(memory, self.cache, routing=own_routing, max_blocks=limit)
        # Without a reference to self: a reference cycle would keep KV alive.
        self.scheduler.on_chunk_end = lambda seq: parked.park([seq])
        self.graphs = DecodeGraphs.of(config, device, model.weights.addresses, self.counters)
        self.uncounted = ("kv_pool_",) * (self.pooled is None) + ("graph",) * (self.graphs is None)
        self.forward = Forward(
            model=model,
            mesh=mesh,
            device=device,
            cache=self.cache,
            parked=self.parked,
            routing=self.routing,
            graphs=self.graphs,
            seed=seed,
            batch_invariant=config.engine.batch_invariant,
            max_rows=config.engine.max_seqs,
        )

    @property
    def _drafter(self) -> Drafter | None:
        return self.scheduler.drafter

    @property
    def parked_kv_bytes(self) -> int:
        return self.parked.host_bytes

    # Memory and weights

    def _kv_bytes(self) -> tuple[int, int]:
        return self.cache.block_bytes, self.cache.workspace_bytes(self.max_length)

    def _allocate(self, blocks: int) -> None:
        self.cache.allocate(blocks, self.max_length)
        if self.routing and self._reports:
            self.routing.allocate(blocks)
        self.scheduler.restart(BlockManager(blocks, self.config.engine.block_size))

    def reconfigure(self, config: RolloutConfig) -> None:
        super().reconfigure(config)
        limits = config.engine
        self.scheduler.max_seqs, self.scheduler.max_batch_tokens = limits.max_seqs, limits.max_batch_tokens
        self.forward.max_rows = limits.max_seqs

    def release_kv(self) -> None:
        self._holds_kv = False
        if self.config.kv_pool.keeps_kv:
            self.parked.park(self.scheduler.running)
        self.parked.settle()
        if self.graphs is not None:
            self.graphs.clear()
        self.scheduler.restart(BlockManager(0, self.config.engine.block_size))
        self.cache.release()
        if self.routing:
            self.routing.allocate(0)

    def _follow_weights(self, version: int) -> None:
        # With rollout.kv_pool.suspended=keep running requests continue on their KV, which no other request can use.
        if self.graphs is not None:
            self.graphs.may_have_moved = True
        if self.config.kv_pool.keeps_kv:
            self.scheduler.change_version(version)
        else:
            if self.pooled is not None:
                self.pooled.clear()
            self.scheduler.restart(version=version)
            self.cache.invalidate()

    # Generation

    def _sequences(self) -> tuple[list[Sequence], WaitingLine[Sequence]]:
        return self.scheduler.running, self.scheduler.waiting

    def _add(self, sequences: Mapping[str, Sequence], orders: Orders) -> None:
        self.parked.forget(orders.forget)
        for seq in sequences.values():
            self.parked.claim(seq)
        held: Collection[str] = ()
        if self.pooled is not None:
            agree = self.control.min_over_ranks
            self.pooled.fetch(orders.submit, sequences, version=self.policy_version, agree=agree)
            held = self.pooled.pull(orders.submit, sequences, self.scheduler)
        for id, seq in sequences.items():
            (self.scheduler.waiting.held.append if id in held else self.scheduler.add)(seq)

    def _abort(self, chosen: Callable[[Request], bool]) -> list[Output]:
        ended = self.scheduler.abort(chosen)
        self.parked.abandon(output.request_id for output in ended)
        return ended

    def _suspend(self) -> list[Output]:
        if self.pooled is not None:
            self.pooled.suspend(self.scheduler.running, self.scheduler.waiting)
        else:
            self.parked.park(self.scheduler.running)
        suspended = self.scheduler.abort(lambda request: True)
        for output in suspended:
            self._locate_kv(output, kept=output.request_id in self.parked)
        return suspended

    def _compute_step(self) -> list[Output]:
        outputs: list[Output] = []
        if self.pooled is not None:
            self.pooled.release(self.scheduler.waiting, self.control.min_over_ranks)
        if self.graphs is not None:
            self.graphs.follow_weights(self.control.min_over_ranks)
        step, computing_s = self.scheduler.schedule(), time.perf_counter()
        assert step or self.scheduler.unfinished == len(self.scheduler.waiting.held)
        self.last_step_kind = step.kind
        if step or self.mesh.ep_group is not None:
            outputs = self._compute(step)
        if self.pooled is not None:
            if not step:
                self.pooled.wait()
            self.pooled.observe_step(step, time.perf_counter() - computing_s)
        return outputs

    def _compute(self, step: EngineStep) -> list[Output]:
        self.counters.dummy_steps += not step
        self.cache.clean(self.scheduler.blocks.highest)
        sampled = self.forward(step)
        if self.pooled is not None:
            self.pooled.offer(step)
        if isnan(sum(sampled.logprobs)):
            seq = next(seq for seq, logprob in zip(step.drawn, sampled.logprobs, strict=True) if isnan(logprob))
            raise FloatingPointError(f"request {seq.request.id!r}: the logits of policy {self.policy_version} are NaN")
        outputs = self.scheduler.commit(step, *sampled)
        for output in outputs:
            kept = output.request_id in self.parked or self.config.engine.prefix_cache
            self._locate_kv(output, kept=kept and output.finish_reason in CONTINUED)
        return outputs

    def _locate_kv(self, output: Output, *, kept: bool) -> None:
        output.kv_rank = self.mesh.dp_rank if kept else None
        if kept and self.pooled is not None:
            output.kv_tokens = self.pooled.computed(output.request_id)
