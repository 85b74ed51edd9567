"""Generate with vLLM in this process: its scheduler, its model and its KV cache, with our requests and our sampler.

    submit, abort ─► control channel ─► place ─► scheduler of each rank ─► worker ─► keyed sampler ─► outputs
                     (any thread)       (same on every rank)   │           ▲
                                                               └─ blocks ─► KV on our card

Every rank has a scheduler of its own. The ranks of a TP group give theirs the same requests at the same step, so that
they schedule alike: whatever order matters (arrival, aborts, ends) is that of the control channel, never that of a set.
Attention ranks schedule their own requests; an idle one computes vLLM's dummy batch for the exchange between experts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping
from math import isnan
from typing import TYPE_CHECKING, Any

from fusion.inference.backends.vllm_core import VllmCore
from fusion.inference.backends.vllm_routing import VllmRouting
from fusion.inference.backends.vllm_sampler import KeyedSampler, propose
from fusion.inference.config import RolloutConfig
from fusion.inference.control import Orders
from fusion.inference.controlled import ControlledEngine
from fusion.inference.request import CONTINUED, FinishReason, Output, Request
from fusion.inference.sequence import Sequence
from fusion.inference.stop_strings import StopStrings
from fusion.inference.verification import Drafter, Verification
from fusion.model import Mesh
from fusion.npu import Device

if TYPE_CHECKING:
    from fusion.inference.backends.vllm_model import VllmModel


class VllmEngine(ControlledEngine):
    """vLLM as an `InferEngine`, whose docstrings specify the methods. Construction is collective.

    Arguments are those of `EmbeddedEngine`; what vLLM cannot do must be None or False (`support.check_vllm`)."""

    def __init__(
        self,
        model: VllmModel,
        mesh: Mesh,
        device: Device,
        config: RolloutConfig,
        seed: int = 0,
        routing: bool = False,
        memory: Any = None,
        stop_strings: StopStrings | None = None,
        drafter: Drafter | None = None,
        kv_store: Any = None,
    ):
        super().__init__(model, mesh, device, config)
        assert kv_store is None, "the config refuses it"
        self.model, self.drafter = model, drafter
        self.core: VllmCore = model.core
        self._max_seqs = config.engine.max_seqs
        self._max_batch_tokens = max(config.engine.max_batch_tokens, config.engine.max_seqs)
        self._stop_strings = stop_strings
        self.sequences: dict[str, Sequence] = {}
        """Unfinished requests of this attention rank in order of arrival"""
        self.sampler = KeyedSampler(self.core.runner, self.sequences, seed)
        self._arrived = 0
        self._may_have_moved = False
        """Whether weights or KV may have been allocated elsewhere since the graphs were captured; on all ranks alike"""
        self.routing = VllmRouting(self.core, model.config) if routing else None

    @property
    def _drafter(self) -> Drafter | None:
        return self.drafter

    @property
    def parked_kv_bytes(self) -> int:
        return 0

    # Memory and weights

    def _kv_bytes(self) -> tuple[int, int]:
        return self.core.kv_block_bytes, self.core.kv_block_bytes  # vLLM keeps a block that it never uses

    @property
    def _block_tokens(self) -> int:
        return self.core.block_size

    def allocate_kv(self) -> None:
        self.model.derive()
        super().allocate_kv()

    def _allocate(self, blocks: int) -> None:
        self.core.allocate_kv(blocks)
        self._may_have_moved = self.config.engine.graphs
        scheduler = self.core.scheduler
        scheduler.max_num_running_reqs = self.config.engine.max_seqs
        scheduler.max_num_scheduled_tokens = self.config.engine.max_batch_tokens

    def reconfigure(self, config: RolloutConfig) -> None:
        """Change the limits of memory, sequences and tokens from the next `allocate_kv` on.
        Raise ValueError: a value out of range, by key; vLLM has sized its buffers by the first config."""
        limits = config.engine
        if limits.max_seqs > self._max_seqs or limits.max_batch_tokens > self._max_batch_tokens:
            raise ValueError(
                f"rollout.engine.max_seqs={limits.max_seqs} (max_batch_tokens={limits.max_batch_tokens}): expected at "
                f"most {self._max_seqs} ({self._max_batch_tokens}), the values at the start, with rollout.backend=vllm"
            )
        super().reconfigure(config)

    def release_kv(self) -> None:
        self._holds_kv = False
        self._restart()
        self.core.release_kv()
        self.model.release_derived()

    def _follow_weights(self, version: int) -> None:
        self._may_have_moved = self.config.engine.graphs
        if self._holds_kv:
            self.model.derive()
        self._restart()

    def _restart(self) -> None:
        """Drop all KV: running requests wait again, with their tokens."""
        self.device.synchronize()  # vLLM on the host reads what the card has written
        if self.core.scheduler is None:
            return
        for seq in self._running():
            self._withdraw(seq)
        self.core.scheduler.reset_prefix_cache(reset_running_requests=True)

    def _withdraw(self, seq: Sequence) -> None:
        if seq.logprobs:
            seq.keep_routing(self.routing)
        seq.known, seq.computed, seq.blocks = max(seq.known, seq.computed), 0, array("q")

    # Generation

    def _running(self) -> list[Sequence]:
        scheduler = self.core.scheduler
        return [] if scheduler is None else [self.sequences[request.request_id] for request in scheduler.running]

    def _sequences(self) -> tuple[Collection[Sequence], Collection[Sequence]]:
        running = {seq.request.id: seq for seq in self._running()}
        return running.values(), [seq for id, seq in self.sequences.items() if id not in running]

    def _abort(self, chosen: Callable[[Request], bool]) -> list[Output]:
        return [self._end(seq, "abort") for seq in list(self.sequences.values()) if chosen(seq.request)]

    def _add(self, sequences: Mapping[str, Sequence], orders: Orders) -> None:
        for seq in sequences.values():
            self._submit(seq)

    def _submit(self, seq: Sequence) -> None:
        from vllm import SamplingParams as VllmParams
        from vllm.v1.request import Request as VllmRequest

        request = seq.request
        self.sequences[request.id] = seq
        self._arrived += 1
        # Its sampling parameters are not passed on: the sampler is ours, and greedy is what vLLM prepares least for.
        ends = VllmParams(
            temperature=0.0,
            max_tokens=seq.limit - len(seq.tokens),
            stop_token_ids=sorted(seq.stop_token_ids),
            ignore_eos=True,
            detokenize=False,
        )
        self.core.scheduler.add_request(
            VllmRequest(
                request.id,
                list(seq.tokens),
                ends,
                None,
                arrival_time=float(self._arrived),
                priority=request.priority,
                block_hasher=self.core.block_hasher,
            )
        )

    def _compute_step(self) -> list[Output]:
        """Run one step of vLLM's scheduler and worker; return the requests that ended."""
        core, totals, drafter, proposed = self.core, self.counters, self.drafter, dict[str, Verification]()
        if self._may_have_moved:
            self._capture()
        if drafter is not None:
            proposed = propose(core, drafter, self._running(), self.config.engine.max_batch_tokens)
        plan = core.scheduler.schedule()
        verified = {name: proposed[name] for name in plan.scheduled_spec_decode_tokens}
        self.sampler.verified = verified
        self._observe(plan)
        core.clean(self._grant(plan))
        result = core.executor.execute_model(plan)
        if result is None:
            result = core.executor.sample_tokens(None)
        totals.dummy_steps += not plan.total_num_scheduled_tokens and self.mesh.parallel.dp > 1
        ended = []
        for of_client in core.scheduler.update_from_output(plan, result).values():
            for output in of_client.outputs:
                ended += self._append(output)
        return ended

    def _capture(self) -> None:
        """Capture vLLM's graphs again on all ranks if on any of them they read weights or KV that have moved."""
        self._may_have_moved = False
        weights = self.model.addresses()
        (unmoved,) = self.control.min_over_ranks([int(self.core.graphs_read(weights))])
        if not unmoved:
            self.core.capture(weights)

    def _observe(self, plan: Any) -> None:
        """Count what vLLM has scheduled, and advance the sequences."""
        totals, sequences = self.counters, self.sequences
        for name in plan.preempted_req_ids or ():
            if name in sequences and sequences[name].blocks:  # not one that `_restart` has withdrawn
                totals.preemptions += 1
                self._withdraw(sequences[name])
        cached = plan.scheduled_cached_reqs
        begun = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        if cached.resumed_req_ids:
            computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            begun |= {name: count for name, count in computed if name in cached.resumed_req_ids}
        for name, hits in begun.items():
            seq = sequences[name]
            seq.computed = hits
            totals.prefix_hit_tokens += hits
            totals.recomputed_tokens += max(0, seq.known - hits)
        decodes = 0
        for name, count in plan.num_scheduled_tokens.items():
            seq = sequences[name]
            decodes += name not in begun and seq.computed + 1 == len(seq.tokens)
            seq.computed += count
        totals.decoded_sequences += decodes
        if plan.num_scheduled_tokens:
            self.last_step_kind = "decode" if decodes == len(plan.num_scheduled_tokens) else "prefill"

    def _grant(self, plan: Any) -> int:
        """Record the KV blocks that requests get in a step of vLLM's; return the highest number, 0: none gets any."""
        cached, highest = plan.scheduled_cached_reqs, 0
        granted = [(new.req_id, new.block_ids) for new in plan.scheduled_new_reqs]
        granted += [one for one in zip(cached.req_ids, cached.new_block_ids, strict=True) if one[1] is not None]
        for name, (blocks,) in granted:  # all layers have the same kind of KV
            self.sequences[name].blocks.extend(blocks)
            highest = max([highest, *blocks])
        return highest

    def _append(self, output: Any) -> list[Output]:
        """Append a request's new tokens; return its output if it ends with one of them."""
        name, totals = output.request_id, self.counters
        seq, reason, appended = self.sequences[name], None, 0
        for token, (logprob, kept) in zip(output.new_token_ids, self.sampler.sampled[name], strict=False):
            if isnan(logprob):
                raise FloatingPointError(f"request {seq.request.id!r}: the logits of policy {self._version} are NaN")
            reason = seq.append(token, logprob, self._version, kept=kept, stop_strings=self._stop_strings)
            appended += 1
            if reason is not None:
                break
        seq.computed = len(seq.tokens) - 1
        totals.generated_tokens += appended
        if (one := self.sampler.verified.get(name)) is not None:
            totals.drafted_tokens += len(one) - 1
            totals.accepted_tokens += appended - 1
            if self.drafter is not None:
                self.drafter.observe([(one, range(appended))])
        if reason is None:
            assert output.finish_reason is None, f"vLLM has ended request {name!r}: {output.finish_reason}"
            return []
        return [self._end(seq, reason)]

    def _end(self, seq: Sequence, reason: FinishReason) -> Output:
        """Remove a request from vLLM unless that has ended it itself; one by one, in the same order on all ranks."""
        from vllm.v1.request import RequestStatus

        name = seq.request.id
        self.core.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self.sequences[name]
        if self.drafter is not None:
            self.drafter.end(seq)
        output = seq.output(reason, self.routing)
        kept = reason in CONTINUED and self.config.engine.prefix_cache
        output.kv_rank = self.mesh.dp_rank if kept else None
        return output
