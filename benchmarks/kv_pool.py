"""Measure the KV pool: a request that moves between two engines by copying, on one machine and between two, against
prefilling it again.

requests. park: the request leaves the first engine, its KV is copied to a file. pull: from the submission to the second
engine until its next token is sampled; of that, fetch: reading and verifying the file. prefill: the same where all
tokens are computed again. step: a decode step of this request. remote_…: the same where the file is on another node of
a Ray cluster, both on this machine: bytes pass between the stores of two raylets over loopback. Floors: memcpy of as
many bytes, a TCP connection over loopback (wire), and their checksum.

prompts. A prompt that one engine has computed and another finds in the pool; a token has as much KV as one of
Qwen2.5-7B, 56 KiB. hit: what the thread that steps the engine spends on it, from the orders of a step to the blocks in
its cache; whole: with its wait until the file is read and verified; in turns with a memcpy of as many bytes. cpu: of
that thread. first_token: from the submission; prefill: the same where the prompt is computed.

A small dense model on one emulated card; median of the repeats.
"""

import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Arguments, Benchmark, Figures, Option, medians_of, timed

BENCHMARK = Benchmark(
    __doc__,
    [Option("tokens", 1024, smoke=64, help="of the prompt")],
    "prompts.hit_over_memcpy <= 1.5",
    parts={"requests": "requests", "prompts": "prompts"},
    sizes={"repeats": (9, 1), "layers": (8, 1), "prompt_layers": (28, 1)},
)
BENCHMARK.run_as(__name__)

# Before Ray is imported, which reads it then: its two nodes talk over this machine's address.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from xxhash import xxh3_64_intdigest

from benchmarks.models import engine_of, model_of
from benchmarks.runs import temporary_folder
from distqueue.payload.sweep import memory
from fusion.inference import EmbeddedEngine, Output, Request, SamplingParams
from fusion.model import Transformer
from fusion.npu import open_device
from fusion.offload import HostPool
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import KVServer, RemotePools
from stalesync.cards.servers import RayPeer
from tests.distqueue.nodes import Nodes
from tests.helpers import tiny_config

SHAPE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, max_position_embeddings=8192)
SHAPE |= dict(num_attention_heads=8, num_key_value_heads=4, head_dim=64)
COLD_BYTES = 256 << 20
"""Bytes of the buffers that the floors use in turn: they do not fit into a cache"""
FLOOR_ROUNDS = 32
WARM_UPS = 5
"""Prompts until every block of a cache for four of them has been used"""
SPEC, ENGINE = KVPoolSpec("benchmark"), 0
"""ENGINE: the number of the engine that parks"""


def requests(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    model, rows = small_model(args.layers), []
    with (
        temporary_folder(dir=memory()) as root,
        temporary_folder(dir=memory()) as elsewhere,
        remote_peer(root) as peer,
    ):
        peers = RemotePools(SPEC.run, {ENGINE: [peer]})
        peers.observe_prefill(1, 1.0)  # so that every pull is awaited, however long it takes
        one, other = make_engine(model, 0, root), make_engine(model, 1, root)
        plain, far = make_engine(model, 2, None), make_engine(model, 3, elsewhere, peers)
        made: list[Any] = [one, other, far]
        prompt = tuple(2 + number % 29 for number in range(args.tokens))
        for repeat in range(args.repeats + 1):
            request = Request(f"r{repeat}", prompt, SamplingParams(max_tokens=8, stop_token_ids=()), chunk_tokens=1)
            park_s, fetch_s, remote_fetch_s = (engine.counters.kv_pool_s for engine in made)
            output = begun(one, request)
            took = {"park": one.counters.kv_pool_s - park_s}
            took["pull"], took["step"] = continued(other, request, output)
            took["prefill"], _ = continued(plain, request, output)
            took["remote_pull"], _ = continued(far, request, begun(one, request))
            took["fetch"] = other.counters.kv_pool_s - fetch_s
            took["remote_fetch"] = far.counters.kv_pool_s - remote_fetch_s
            rows += [took] if repeat else []  # the first one allocates
            one.forget([request.id])
        assert other.counters.kv_pool_pulls == far.counters.kv_pool_remote == args.repeats + 1
        nbytes = other.counters.kv_pool_bytes // (args.repeats + 1)
        for engine in made:
            engine.pooled.store.close()
    figures = medians_ms(rows) | floors_ms(nbytes)
    ratios = {f"prefill_over_{pull}": figures["prefill_ms"] / figures[f"{pull}_ms"] for pull in ("pull", "remote_pull")}
    return {"tokens": args.tokens, "kv_mib": nbytes / 2**20} | figures | ratios


def prompts(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    model = small_model(args.prompt_layers, head_dim=128)
    changes = dict(prefix_cache=True, pull_tokens=16, max_kv_tokens=4 * args.tokens)
    with temporary_folder(dir=memory()) as root:
        one, other = (make_engine(model, rank, root, **changes) for rank in range(2))
        nbytes = (args.tokens - 1) // one.config.engine.block_size * one.cache.block_bytes
        buffers, rows = cold_buffers(nbytes), []
        for repeat in range(-WARM_UPS, args.repeats):
            prompt = (repeat + WARM_UPS + 2, *(2 + number % 29 for number in range(args.tokens - 1)))
            request = Request(f"r{repeat}", prompt, SamplingParams(max_tokens=1, stop_token_ids=()))
            one.submit([request])
            row = {"prefill": timed(one.run)}
            while one.pooled._writes:  # and nothing of them competes with what is measured next
                one.parked.settle()
            other.submit([request])
            began_s, cpu_s, waited_s = time.perf_counter(), time.thread_time(), 0.0
            other._take_orders()
            while not other.scheduler.waiting:
                waited_s += timed(other.pooled.wait)
                other.pooled.release(other.scheduler.waiting, other.control.min_over_ranks)
            step = other.scheduler.schedule()
            other.parked.restore(step.restored)
            row |= {"whole": time.perf_counter() - began_s, "hit_cpu": time.thread_time() - cpu_s}
            row["hit"] = row["whole"] - waited_s
            other._compute(replace(step, restored=[]))
            row["first_token"] = time.perf_counter() - began_s
            cpu_s = time.thread_time()
            row["memcpy"] = timed(lambda: next(buffers).copy_(next(buffers)))
            row["memcpy_cpu"] = time.thread_time() - cpu_s
            rows += [row] if repeat >= 0 else []
        assert other.counters.kv_pool_prompts == args.repeats + WARM_UPS
        for made in (one, other):
            made.pooled.store.close()
    ratios = {
        f"{name}_over_memcpy": median(row[name] / row["memcpy_cpu" if name == "hit_cpu" else "memcpy"] for row in rows)
        for name in ("hit", "whole", "hit_cpu")
    }
    return {"tokens": args.tokens, "kv_mib": nbytes / 2**20} | medians_ms(rows) | ratios


def medians_ms(rows: list[dict[str, float]]) -> Figures:
    return {f"{name}_ms": 1e3 * value for name, value in medians_of(rows).items()}


def small_model(layers: int, **changes: int) -> Transformer:
    config = tiny_config(experts=False, num_hidden_layers=layers, **SHAPE | changes)
    return model_of(config, open_device("emulated"), dtype=torch.bfloat16).requires_grad_(False)


def make_engine(
    model: Transformer, rank: int, root: Path | None, peers: RemotePools | None = None, **changes: Any
) -> EmbeddedEngine:
    limits: dict[str, Any] = dict(max_seqs=4, max_batch_tokens=8192, max_kv_tokens=16384, prefix_cache=False)
    limits |= {"suspended": "recompute" if root is None else "pool"} | changes
    store = None if root is None else KVFiles(SPEC, rank, root, peers)
    return engine_of(model, memory=HostPool(model.device), kv_store=store, **limits)


def begun(made: EmbeddedEngine, request: Request) -> Output:
    """Generate the first chunk of a request, at whose end it is parked."""
    made.submit([request])
    (output,) = made.run()
    return output


def continued(made: EmbeddedEngine, request: Request, output: Output) -> tuple[float, float]:
    """Return the seconds until an engine has sampled the next token of a request that another one has begun, and until
    it has sampled the one behind it."""
    done: Any = dict(response=tuple(output.tokens), kv_tokens=output.kv_tokens, kv_engine=ENGINE)
    made.submit([replace(request, chunk_tokens=0, exact_tokens=len(output.tokens) + 2, **done)])
    first_s, second_s = timed(made.step), timed(made.step)
    made.run()
    return first_s, second_s


@contextmanager
def remote_peer(root: Path) -> Iterator[RayPeer]:
    """Run a server of ``root`` on a second node: objects reach this process from there over a connection between the
    stores of two raylets."""
    nodes = Nodes(forked=False)
    try:
        node = nodes.other()
        place = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
        server = ray.remote(num_cpus=0)(KVServer).options(scheduling_strategy=place).remote(SPEC, root)
        yield RayPeer(node.node_id, ray.get(server.boot.remote()), server)
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()


def cold_buffers(nbytes: int) -> Iterator[torch.Tensor]:
    return cycle([torch.ones(nbytes, dtype=torch.uint8) for _ in range(max(4, COLD_BYTES // nbytes))])


def floors_ms(nbytes: int) -> Figures:
    """Return the least milliseconds of a copy, a checksum, and a TCP connection over loopback, of as many bytes."""
    buffers = cold_buffers(nbytes)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = socket.create_connection(listener.getsockname())
        receiver, _ = listener.accept()
    content, buffer = bytes(nbytes), bytearray(nbytes)

    def send() -> None:
        sending = threading.Thread(target=sender.sendall, args=(content,))
        sending.start()
        view = memoryview(buffer)
        while view.nbytes:
            view = view[receiver.recv_into(view) :]
        sending.join()

    works: Any = dict(memcpy=lambda: next(buffers).copy_(next(buffers)), wire=send)
    works["checksum"] = lambda: xxh3_64_intdigest(next(buffers).numpy().data)
    with sender, receiver:
        return {f"floor_{name}_ms": min(timed(work) for _ in range(FLOOR_ROUNDS)) * 1e3 for name, work in works.items()}
