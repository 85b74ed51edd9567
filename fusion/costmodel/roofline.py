"""How long one step of a die takes: a decode step, a prefill, a training step, an update; pure functions.

    seconds = max(operations / reached flops, bytes / HBM bandwidth) of every stage it passes
            + link bytes / link bandwidth + exchanges x their latency + `layer_s` a layer

The same figures as `work`, which ranks whole layouts with them, by the step instead of by the batch. A die reads its
weights once a step, of its experts those that a token of the step is routed to (in the mean, routing being even), and
the KV cache of its sequences; TP, EP and PP cost what their exchanges carry.

Invariants: seconds, operations and bytes grow with every argument; what a step of twice the sequences takes is at most
twice as much, so a sequence costs least in a full batch; a pass over the same tokens in two training steps of whole
micro-batches costs what it costs in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.memory import GRADIENT, STATES, WEIGHT, held
from fusion.costmodel.shape import Shape
from fusion.costmodel.step_time import crowding, reach
from fusion.model import Parallel

CHUNK_TOKENS = 8192
"""Tokens of a step of nothing but prefill: a prompt is cut there."""

TP_LATENCY = 1 / 8
"""Latency of an exchange between the dies of a TP group, as part of one between all dies."""


@dataclass(frozen=True)
class Work:
    """What a die does in a step, and how long that takes."""

    seconds: float
    flops: float = 0.0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.seconds + other.seconds,
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            self.link_bytes + other.link_bytes,
        )

    def __mul__(self, times: float) -> Work:
        return Work(self.seconds * times, self.flops * times, self.hbm_bytes * times, self.link_bytes * times)


def pairs(count: float, before: float = 0.0) -> float:
    """(token, token it attends to) of ``count`` tokens behind ``before`` others."""
    return count * before + count * count / 2


@dataclass(frozen=True)
class _Stage:
    """What a die of a pipeline stage holds: layers, sparse ones, elements that every token meets, and of experts."""

    layers: int
    sparse: int
    dense: int
    experts: int


class Roofline:
    """A model in a layout on dies of a kind. Arguments are of one data-parallel rank; the others are taken to do alike,
    and all figures are of one die."""

    def __init__(self, shape: Shape, hardware: Hardware, parallel: Parallel):
        self.shape, self.hardware, self.parallel = shape, hardware, parallel
        self._stages = [self._stage(stage) for stage in range(parallel.pp)]
        here = max((held(shape, parallel, stage) for stage in range(parallel.pp)), key=lambda h: h.numel)
        self._held, self._states = here.numel, here.states_bytes(parallel)
        heads = -(-shape.kv_heads // parallel.tp) / shape.kv_heads if shape.kv_heads else 1
        self._kv_bytes = shape.kv_elements * heads * WEIGHT
        # Operations of a pair: 4 a channel of the queries; of MLA, 2 x (192 + 128) where the width has 2 x 192 + 128.
        width = 4 * (shape.qkv_width - shape.kv_elements) if shape.kv_heads else 1.25 * shape.qkv_width
        self._pair_flops = width / parallel.tp

    def decode_step(self, sequences: float, kv_tokens: float) -> Work:
        """One token for each of so many sequences that have so many tokens in the cache, all together."""
        return self.engine_step(sequences, kv_tokens)

    def prefill(self, tokens: float, attended: float) -> Work:
        """Tokens of prompts, computed in chunks; ``attended``: their `pairs`."""
        chunks = ceil(tokens / CHUNK_TOKENS)
        return self.engine_step(0, 0, tokens / chunks, attended / chunks) * chunks if chunks else Work(0.0)

    def engine_step(
        self, sequences: float, kv_tokens: float, prefill_tokens: float = 0.0, attended: float = 0.0
    ) -> Work:
        """A step that decodes and prefills: the weights are read once for both."""
        tokens = sequences + prefill_tokens
        total = Work(self.exchanges * self.hardware.collective_s.value + self._launches)
        for stage in self._stages:
            flops = self._flops(stage, tokens, kv_tokens + attended)
            read = WEIGHT * (stage.dense + stage.experts * self.touched(tokens))
            read += (kv_tokens + tokens) * self._kv_bytes * stage.layers
            total += self._bound(flops, read, self.hardware.forward_reached.value)
            total += self._links(stage, tokens, passes=1)
        return total

    def ideal_decode_s(self, sequences: float, kv_tokens: float, full: float) -> float:
        """What a decode step would take of a die that is as full as ``full`` sequences make it: its share of a full
        step, with contexts as long as these. The rest of the step is for want of sequences."""
        if not sequences:
            return 0.0
        full = max(full, sequences)
        return self.decode_step(full, kv_tokens * full / sequences).seconds * sequences / full

    def forward(self, tokens: float, attended: float, token_budget: int) -> Work:
        """A pass without gradients, as for log-probabilities, in micro-batches."""
        return self._batch(tokens, attended, token_budget, 1, self.hardware.forward_reached.value)

    def train_step(self, tokens: float, attended: float, token_budget: int, recompute: bool = True) -> Work:
        """Forward, backward and recomputation."""
        return self._batch(tokens, attended, token_budget, 4 if recompute else 3, self.hardware.train_reached.value)

    def optimizer_step(self) -> Work:
        """Gradients summed over replicas, states read and written, weights gathered."""
        replicas = self.parallel.dp
        moved = self._held * (GRADIENT + WEIGHT) * (replicas - 1) / replicas
        touched = 2 * self._states + self._states / STATES * (GRADIENT + WEIGHT)
        memory = Work(touched / self.hardware.hbm_bytes_per_s.value, hbm_bytes=touched)
        wire = Work(moved / reach(self.hardware, self.parallel.stage_world), link_bytes=moved)
        return memory + wire + Work(2 * self.hardware.collective_s.value if replicas > 1 else 0.0)

    def touched(self, tokens: float) -> float:
        """The share of the experts that a token of the group's is routed to: 1 - (1 - k/E)^tokens of all its ranks."""
        if not self.shape.experts:
            return 0.0
        return 1 - (1 - self.shape.top_k / self.shape.experts) ** (tokens * self._brought)

    @property
    def exchanges(self) -> float:
        """Latencies of one pass of all stages."""
        sparse, layers = sum(stage.sparse for stage in self._stages), len(self.shape.layers)
        parallel = self.parallel
        found = 2.0 * sparse if parallel.ep * parallel.etp > 1 else 0.0
        return found + (2 * layers * TP_LATENCY if parallel.tp > 1 else 0.0) + (parallel.pp - 1) * TP_LATENCY

    @property
    def _launches(self) -> float:
        return len(self.shape.layers) * self.hardware.layer_s.value

    @property
    def _brought(self) -> float:
        """Tokens that come to a die's experts' group for one of a data-parallel rank."""
        return self.parallel.ep * self.parallel.etp / self.parallel.tp

    def _batch(self, tokens: float, attended: float, token_budget: int, passes: int, reached: float) -> Work:
        if not tokens:
            return Work(0.0)
        micro_batches = ceil(tokens / token_budget)
        crowded = crowding(self.shape, self.parallel)
        found = []
        for stage in self._stages:
            flops = passes * self._flops(stage, tokens, attended, crowded)
            read = passes * micro_batches * WEIGHT * (stage.dense + stage.experts)
            found.append(self._bound(flops, read, reached) + self._links(stage, tokens, passes, crowded))
        longest = max(found, key=lambda work: work.seconds)
        bubble = 1 + (self.parallel.pp - 1) / micro_batches
        return Work(longest.seconds * bubble, longest.flops, longest.hbm_bytes, longest.link_bytes)

    def _flops(self, stage: _Stage, tokens: float, attended: float, crowded: float = 1.0) -> float:
        routed = 0.0
        if self.shape.experts:
            routed = stage.experts * self._brought * self.shape.top_k / self.shape.experts * crowded
        return 2 * tokens * (stage.dense + routed) + attended * self._pair_flops * stage.layers

    def _bound(self, flops: float, read: float, reached: float) -> Work:
        hardware = self.hardware
        seconds = max(flops / (hardware.flops.value * reached), read / hardware.hbm_bytes_per_s.value)
        return Work(seconds, flops, read)

    def _links(self, stage: _Stage, tokens: float, passes: int, crowded: float = 1.0) -> Work:
        parallel, shape = self.parallel, self.shape
        experts = parallel.ep * parallel.etp
        row = tokens * shape.hidden_size * WEIGHT * passes
        tp = 4 * stage.layers * row * (parallel.tp - 1) / parallel.tp
        ep = 2 * stage.sparse * shape.top_k * crowded * row / parallel.tp * (1 - 1 / experts)
        pp = row / parallel.tp if parallel.pp > 1 else 0.0
        speed = reach(self.hardware, parallel.tp), reach(self.hardware, experts), reach(self.hardware, parallel.world)
        return Work(tp / speed[0] + ep / speed[1] + pp / speed[2], link_bytes=tp + ep + pp)

    def _stage(self, number: int) -> _Stage:
        shape, parallel = self.shape, self.parallel
        layers = [shape.layers[i] for i in parallel.layers(len(shape.layers), number)]
        here = held(shape, parallel, number)
        looked_up = number == 0 and (parallel.pp > 1 or not shape.tied)
        dense = here.dense - (shape.embed.numel // parallel.tp if looked_up else 0)
        return _Stage(len(layers), sum(layer.experts > 0 for layer in layers), dense, here.expert)
