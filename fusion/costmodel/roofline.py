"""Estimate the seconds of one step of a die: of an engine, of a prefill, of training, of the optimizer.

    seconds = max(operations / reached flops, bytes / HBM bandwidth), summed over the pipeline stages
            + link bytes / link bandwidth + exchanges x latency + `layer_s` per layer
    seconds >= launches x `launch_s` (`launches.py`)

The same constants as `step_time`, which ranks whole layouts with them, per step instead of per batch. In a step a die
reads its weights once, of its experts those that a token of the step is routed to (the expectation under uniform
routing), and the KV cache of its sequences; TP, EP and PP add the bytes and latencies of their exchanges.

Invariants: seconds grow with every argument; a step of twice the sequences takes at most twice as
long, so a sequence costs least in a full batch; two training steps of whole micro-batches cost as much as one step over
all their tokens."""

from collections import Counter
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil
from typing import NamedTuple

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.launches import decode_floor_s, launches_of
from fusion.costmodel.memory import GRADIENT_BYTES, STATE_BYTES, WEIGHT_BYTES, stage_weights, trained_weights
from fusion.costmodel.shape import Shape
from fusion.costmodel.step_time import exchange_s, expert_load_factor, group_bytes_per_s
from fusion.model import Parallel

CHUNK_TOKENS = 8192
"""Tokens of a step that only prefills: longer prompts are computed in chunks of this size."""
TP_LATENCY = 1 / 8
"""Latency of an exchange within a TP group, as a share of that of one between all dies."""


class Line(NamedTuple):
    """A bound of an engine step's seconds: ``fixed`` + ``per_attended`` x pairs of prefill + ``per_decoded`` x pairs of
    decoding, of which there is one for each KV token, + ``per_kv`` x KV tokens."""

    fixed: float
    per_attended: float
    per_decoded: float
    per_kv: float

    def __call__(self, kv_tokens: float, attended: float = 0.0, drafted_pairs: float = 0.0) -> float:
        decoded = self.per_decoded * (kv_tokens + drafted_pairs)
        return self.fixed + self.per_attended * attended + decoded + self.per_kv * kv_tokens


def attention_pairs(count: float, before: float = 0.0) -> float:
    """Count the (query, key) pairs of causal attention of ``count`` tokens after ``before`` others."""
    return count * before + count * count / 2


@dataclass(frozen=True)
class _Stage:
    """A die's part of a pipeline stage: layers, those of them with experts, elements that every token meets, and
    elements of experts."""

    layers: int
    sparse: int
    dense: int
    experts: int


class Roofline:
    """Estimate the seconds of a model's steps in a layout on one kind of die. Arguments are those of one data-parallel
    rank, in training of one replica, all others being alike; results are those of one die."""

    def __init__(self, shape: Shape, hardware: Hardware, parallel: Parallel):
        self.shape, self.hardware, self.parallel = shape, hardware, parallel
        self._stages = [self._stage(stage) for stage in range(parallel.pp)]
        trained = max((trained_weights(shape, parallel, stage) for stage in range(parallel.pp)), key=lambda w: w.numel)
        self._trained, self._states = trained.numel, trained.states_bytes(parallel)
        self._kv_bytes = shape.attention.kv_elements_of_rank(parallel.tp, parallel.dcp) * WEIGHT_BYTES
        self._pair_flops = shape.attention.pair_flops / parallel.tp
        self._decode_pair_flops = shape.attention.decode_pair_flops / parallel.tp
        self.step_lines = cache(self._step_lines)
        """Lines for a number of tokens, computed once for each"""

    def prefill_s(self, tokens: float, attended: float) -> float:
        """Estimate a prefill of prompts, computed in chunks; ``attended``: their `attention_pairs`."""
        chunks = ceil(tokens / CHUNK_TOKENS)
        return self.engine_step_s(0, 0, tokens / chunks, attended=attended / chunks) * chunks if chunks else 0.0

    def engine_step_s(
        self,
        sequences: float,
        kv_tokens: float,
        prefill_tokens: float = 0.0,
        attended: float = 0.0,
        drafted_pairs: float = 0.0,
    ) -> float:
        """Estimate a step that decodes one token of each sequence, and prefills: the weights are read once for both.
        ``kv_tokens``: tokens in the cache, summed over the sequences.
        ``prefill_tokens``: of prompts, and of drafts to verify.
        ``attended``: `attention_pairs` of the tokens of prompts.
        ``drafted_pairs``: those of drafts, which attend as decoded tokens do."""
        lines = self._step_lines(sequences + prefill_tokens)
        return max(line(kv_tokens, attended, drafted_pairs) for line in lines)

    def _step_lines(self, tokens: float) -> tuple[Line, ...]:
        """Return lines whose maximum is `engine_step_s` for this many tokens, decoded and prefilled: per
        kind of stage one line for operations and one for HBM, summed over the stages in every combination; and one for
        the launches, where they may take longer."""
        hardware = self.hardware
        compute = 1 / (hardware.flops.value * hardware.forward_reached.value)
        memory = 1 / hardware.hbm_bytes_per_s.value
        fixed = self.exchanges * hardware.collective_s.value + self._overheads
        fixed += sum(self._links_s(stage, tokens, passes=1) for stage in self._stages)
        lines = [Line(fixed, 0.0, 0.0, 0.0)]
        for stage, count in Counter(self._stages).items():
            flops = count * compute * self._flops(stage, tokens)
            read = WEIGHT_BYTES * (stage.dense + stage.experts * self.experts_read(tokens))
            read = count * memory * (read + tokens * self._kv_bytes * stage.layers)
            pairs_s = count * compute * stage.layers
            bounds = (
                Line(flops, pairs_s * self._pair_flops, pairs_s * self._decode_pair_flops, 0.0),
                Line(read, 0.0, 0.0, count * memory * self._kv_bytes * stage.layers),
            )
            lines = [Line(*map(sum, zip(line, bound, strict=True))) for line in lines for bound in bounds]
        floor = self.launch_floor_s
        return (*lines, Line(floor, 0.0, 0.0, 0.0)) if floor > fixed else tuple(lines)

    def ideal_decode_s(self, sequences: float, kv_tokens: float, full: float) -> float:
        """Estimate the seconds of these sequences as their share of a decode step of ``full`` sequences with equally
        long contexts. The difference to `engine_step_s` is lost because there are too few sequences."""
        if not sequences:
            return 0.0
        full = max(full, sequences)
        return self.engine_step_s(full, kv_tokens * full / sequences) * sequences / full

    def forward_s(self, tokens: float, attended: float, token_budget: int) -> float:
        """Estimate a pass without gradients, as for logprobs, in micro-batches."""
        return self._batch_s(tokens, attended, token_budget, passes=1, reached=self.hardware.forward_reached.value)

    def train_step_s(self, tokens: float, attended: float, token_budget: int, recompute: bool = True) -> float:
        """Estimate forward and backward passes with recomputation, in micro-batches. With adapters no gradient of the
        base is computed: a pass less."""
        passes = 3 + recompute - (self.shape.adapters is not None)
        return self._batch_s(tokens, attended, token_budget, passes, reached=self.hardware.train_reached.value)

    def optimizer_step_s(self) -> float:
        """Estimate the reduction of gradients over replicas, reading and writing states, and gathering weights."""
        touched = 2 * self._states + self._states / STATE_BYTES * (GRADIENT_BYTES + WEIGHT_BYTES)
        memory_s = touched / self.hardware.hbm_bytes_per_s.value
        wire_s = self.optimizer_link_bytes / group_bytes_per_s(self.hardware, self.parallel.stage_world)
        return memory_s + wire_s + (2 * self.hardware.collective_s.value if self.parallel.dp > 1 else 0.0)

    @property
    def optimizer_link_bytes(self) -> float:
        """Bytes of gradients and of gathered weights that a die sends in an optimizer step."""
        replicas = self.parallel.dp
        return self._trained * (GRADIENT_BYTES + WEIGHT_BYTES) * (replicas - 1) / replicas

    def experts_read(self, tokens: float) -> float:
        """Estimate the share of a die's experts that any token of its group is routed to:
        1 - (1 - k/E)^(tokens of the group)."""
        config = self.shape.config
        if not config.num_experts:
            return 0.0
        return 1 - (1 - config.top_k / config.num_experts) ** (tokens * self._expert_tokens_per_token)

    @property
    def exchanges(self) -> float:
        """Number of exchanges in one pass of all stages, in latencies of one between all dies."""
        sparse, layers = sum(stage.sparse for stage in self._stages), self.shape.config.num_layers
        parallel = self.parallel
        expert = 2.0 * sparse if parallel.ep * parallel.etp > 1 else 0.0
        within = (2 * layers * (parallel.tp > 1) + 2 * layers * (parallel.dcp > 1)) * TP_LATENCY
        return expert + within + (parallel.pp - 1) * TP_LATENCY

    @cached_property
    def launch_floor_s(self) -> float:
        """Seconds in which the host launches a step of the engine."""
        return decode_floor_s(self.shape, self.hardware, self.parallel)

    @property
    def _overheads(self) -> float:
        return self.shape.config.num_layers * self.hardware.layer_s.value

    @property
    def _expert_tokens_per_token(self) -> float:
        """Tokens that reach a die's group of experts for each token of a data-parallel rank."""
        return self.parallel.ep * self.parallel.etp / self.parallel.tp

    def _batch_s(self, tokens: float, attended: float, token_budget: float, passes: int, reached: float) -> float:
        if not tokens:
            return 0.0
        tokens, attended, token_budget = (size / self.parallel.cp for size in (tokens, attended, token_budget))
        micro_batches = ceil(tokens / token_budget)
        expert_load = expert_load_factor(self.shape, self.parallel)
        launches = launches_of(self.hardware.operators, self.parallel).of_passes(passes)
        stages, floor_s = [], micro_batches * launches * self.hardware.launch_s.value
        for stage in self._stages:
            flops = passes * self._flops(stage, tokens, attended, expert_load=expert_load)
            read = passes * micro_batches * WEIGHT_BYTES * (stage.dense + stage.experts)
            seconds = self._bound_s(flops, read, reached) + self._links_s(stage, tokens, passes, expert_load)
            stages.append(max(seconds, stage.sparse * floor_s))
        return max(stages) * (1 + (self.parallel.pp - 1) / micro_batches)

    def _flops(self, stage: _Stage, tokens: float, attended: float = 0.0, expert_load: float = 1.0) -> float:
        routed, config = 0.0, self.shape.config
        if config.num_experts:
            routed = stage.experts * self._expert_tokens_per_token * config.top_k / config.num_experts * expert_load
        return 2 * tokens * (stage.dense + routed) + attended * self._pair_flops * stage.layers

    def _bound_s(self, flops: float, read: float, reached: float) -> float:
        hardware = self.hardware
        return max(flops / (hardware.flops.value * reached), read / hardware.hbm_bytes_per_s.value)

    def _links_s(self, stage: _Stage, tokens: float, passes: int, expert_load: float = 1.0) -> float:
        shape, hardware, parallel = self.shape, self.hardware, self.parallel
        sizes = dict(rows=tokens * passes, layers=stage.layers, sparse=stage.sparse, load=expert_load)
        seconds = exchange_s(shape, hardware, parallel, **sizes)
        if parallel.pp == 1:
            return seconds
        sent = tokens * passes * shape.config.hidden_size * WEIGHT_BYTES / parallel.tp
        return seconds + sent / group_bytes_per_s(hardware, parallel.world)

    def _stage(self, number: int) -> _Stage:
        shape, parallel = self.shape, self.parallel
        layers = parallel.layers(shape.config.num_layers, number)
        here = stage_weights(shape, parallel, number)
        looked_up = number == 0 and (parallel.pp > 1 or not shape.tied)
        dense = here.dense - (shape.held("embed", parallel.tp) if looked_up else 0)
        return _Stage(len(layers), len(shape.config.sparse(layers)), dense, experts=here.expert)
