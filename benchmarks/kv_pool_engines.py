"""Move one request between two engines of an emulated card, for `kv_pool.py`."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import torch
from xxhash import xxh3_64_intdigest

from benchmarks.kv_pool_remote import remote_peer, wire_s
from distqueue.payload.sweep import memory
from fusion.inference import EmbeddedEngine, Output, Request, RolloutConfig, SamplingParams
from fusion.model import Mesh, ModelConfig, Transformer, load_weights
from fusion.npu import open_device
from fusion.offload import HostPool
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import RemotePools
from tests.helpers import tiny_checkpoint

SHAPE = dict(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=8192,
)
REPEATS = 9

NAMES = ("park", "pull", "fetch", "prefill", "step", "remote_pull", "remote_fetch")
"""What is measured"""

COLD_BUFFERS = 32
"""Buffers that the floors use in turn: together they do not fit into a cache"""


SPEC = KVPoolSpec("benchmark")

ENGINE = 0
"""The number of the engine that parks"""


def engine(model: Transformer, rank: int, root: Path | None, peers: RemotePools | None = None) -> EmbeddedEngine:
    device = model.device
    config = RolloutConfig(
        max_seqs=4,
        max_batch_tokens=8192,
        max_kv_tokens=16384,
        prefix_cache=False,
        suspended_kv="recompute" if root is None else "pool",
    )
    store = None if root is None else KVFiles(SPEC, rank, root, peers)
    made = EmbeddedEngine(model, model.mesh, device, config, memory=HostPool(device), kv_store=store)
    made.allocate_kv()
    return made


def continued(made: EmbeddedEngine, request: Request, output: Output) -> tuple[float, float]:
    """Seconds until an engine has sampled the next token of a request that another one has begun, and the one behind
    it."""
    response = tuple(output.tokens)
    again = replace(
        request,
        response=response,
        chunk_tokens=0,
        exact_tokens=len(response) + 2,
        kv_tokens=output.kv_tokens,
        kv_engine=ENGINE,
    )
    made.submit([again])
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        made.step()
        seconds.append(time.perf_counter() - began)
    made.run()
    return seconds[0], seconds[1]


def measure(num_tokens: int) -> dict[str, float]:
    device = open_device("emulated")
    with (
        tempfile.TemporaryDirectory(dir=memory()) as folder,
        tempfile.TemporaryDirectory(dir=memory()) as elsewhere,
        tempfile.TemporaryDirectory() as checkpoint,
        remote_peer(SPEC, Path(folder)) as peer,
    ):
        tiny_checkpoint(checkpoint, experts=False, **SHAPE)
        model = Transformer(ModelConfig.from_hf(checkpoint), Mesh.single(), device, torch.bfloat16)
        model.requires_grad_(False)
        load_weights(model, checkpoint)
        root = Path(folder)
        one, other, plain = engine(model, 0, root), engine(model, 1, root), engine(model, 2, None)
        peers = RemotePools(SPEC.run, {ENGINE: [peer]})
        peers.observe_prefill(1, 1.0)  # so that every pull is awaited, however long it takes
        far = engine(model, 3, Path(elsewhere), peers)
        assert one.pooled is not None and other.pooled is not None and far.pooled is not None
        prompt = tuple(2 + number % 29 for number in range(num_tokens))
        seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        for repeat in range(REPEATS + 1):
            request = Request(f"r{repeat}", prompt, SamplingParams(max_tokens=8, stop_token_ids=()), chunk_tokens=1)
            before = [made.counters.kv_pool_s for made in (one, other, far)]
            one.submit([request])
            (output,) = one.run()
            park = one.counters.kv_pool_s
            pull, step = continued(other, request, output)
            prefill, _ = continued(plain, request, output)
            one.submit([request])
            (output,) = one.run()
            remote_pull, _ = continued(far, request, output)
            fetch, remote_fetch = (made.counters.kv_pool_s for made in (other, far))
            values = park - before[0], pull, fetch - before[1], prefill, step, remote_pull, remote_fetch - before[2]
            for name, value in zip(seconds, values, strict=True):
                seconds[name] += [value] if repeat else []  # the first one allocates
            one.forget([request.id])
        assert other.counters.kv_pool_pulls == far.counters.kv_pool_remote == REPEATS + 1
        nbytes = other.counters.kv_pool_bytes // (REPEATS + 1)
        for store in (one.pooled.store, other.pooled.store, far.pooled.store):
            assert isinstance(store, KVFiles)
            store.close()
    buffers = cycle([torch.ones(nbytes, dtype=torch.uint8) for _ in range(COLD_BUFFERS)])
    floors = {
        "floor_memcpy_ms": fastest(lambda: next(buffers).copy_(next(buffers))) * 1e3,
        "floor_wire_ms": wire_s(nbytes) * 1e3,
        "floor_checksum_ms": fastest(lambda: xxh3_64_intdigest(next(buffers).numpy().data)) * 1e3,
    }
    medians = {f"{name}_ms": statistics.median(values) * 1e3 for name, values in seconds.items()}
    ratio = medians["prefill_ms"] / medians["pull_ms"]
    remote_ratio = medians["prefill_ms"] / medians["remote_pull_ms"]
    ratios = {"prefill_over_pull": ratio, "prefill_over_remote_pull": remote_ratio}
    return {"tokens": num_tokens, "kv_mib": nbytes / 2**20, **medians, **floors, **ratios}


def fastest(call: Callable[[], object], repeats: int = 2 * COLD_BUFFERS) -> float:
    """Returns the least seconds of a call."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
