"""Small models, and ranks to run them on.

The processes that play ranks are forked from one that has imported torch, and reused by every test of a run: importing
it costs more than most tests.
"""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import multiprocessing as mp
import os
import pickle
import tempfile
import threading
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fusion.model import ModelConfig
from tests.machine import Deadline

TINY = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    tie_word_embeddings=True,
    initializer_range=0.2,
    max_position_embeddings=1024,
    eos_token_id=1,
    pad_token_id=0,
)
MINIMAL = dict(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
"""A model whose computation costs as little as possible"""
TINY_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)


def tiny_hf(experts: bool = True, **changes: Any):
    """A transformers model of a few thousand parameters with fixed weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(7)
    if experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(TINY | TINY_EXPERTS | changes))).eval()
    return Qwen3ForCausalLM(Qwen3Config(**(TINY | changes))).eval()


def tiny_checkpoint(folder: str | Path, experts: bool = True, **changes: Any) -> str:
    """Writes `tiny_hf` to a folder and returns it."""
    tiny_hf(experts, **changes).save_pretrained(folder)
    return str(folder)


def runnable_checkpoint(folder: Path, experts: bool = False, **shape: Any) -> Path:
    """Writes a `tiny_checkpoint` with the tokenizer of the arithmetic tasks; returns its folder."""
    from stalesync.prompts import make_tokenizer

    tokenizer = make_tokenizer(folder)
    tokens = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    tiny_checkpoint(folder, experts, **{"vocab_size": len(tokenizer)} | tokens | shape)
    return folder


def tiny_config(experts: bool = True, **changes: Any) -> ModelConfig:
    kind = {"model_type": "qwen3_moe" if experts else "qwen3"}
    return ModelConfig.from_hf(TINY | (TINY_EXPERTS if experts else {}) | kind | changes)


@lru_cache(maxsize=1)
def processes() -> Any:
    """A multiprocessing context whose processes are forked from one that has imported torch, and nothing else yet."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        ["tests.harness.preload", "torch._dynamo"]
    )  # the latter is imported by recomputation
    return context


def run_ranks(fn: Callable, world: int, *args: Any, device: str = "emulated", timeout_s: float = 120) -> list[Any]:
    """Calls ``fn(rank, device, *args)`` in ``world`` joined processes; returns the results by rank.

    ``fn`` is a module-level function. The first failure is raised with its rank and traceback; its processes are then
    ended, as the others may wait for the failed one for ever. ``device="adversarial"``: emulated cards with
    streams=adversarial.

    At times gloo's sockets do not find each other ("connectFullMesh failed"), before any of our
    code has run in them: new processes try once more then.
    """
    try:
        return _run_ranks(fn, world, args, device, timeout_s)
    except RuntimeError as error:
        if "connectFullMesh failed" not in str(error):
            raise
        return _run_ranks(fn, world, args, device, timeout_s)


def _run_ranks(fn: Callable, world: int, args: tuple[Any, ...], device: str, timeout_s: float) -> list[Any]:
    _pool.grow(world)
    store = f"file://{_pool.folder.name}/{next(_pool.calls)}"  # the last rank that leaves removes the file
    for rank in range(world):
        _send(_pool.pipes[rank], (fn, rank, world, store, device, args))
    return _pool.collect(world, timeout_s)


def in_fork(fn: Callable[[], None], **environment: str) -> tuple[str, str]:
    """Call ``fn`` in a process of its own, with ``environment`` beside this one's; return what it has written to
    standard output and error. ``fn`` is a module-level function."""
    here, there = processes().Pipe()
    process = processes().Process(target=_written, args=(there, fn, environment), daemon=True)
    process.start()
    there.close()
    deadline = Deadline(60)
    while not here.poll(deadline.left_s()):
        assert not deadline.expired(), f"{fn.__name__} did not end"
    written = here.recv()
    process.join()
    return written


def _written(pipe: Connection, fn: Callable[[], None], environment: dict[str, str]) -> None:
    os.environ.update(environment)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            fn()
        except BaseException:
            traceback.print_exc()
    pipe.send((out.getvalue(), errors.getvalue()))


class _Pickler(pickle.Pickler):
    """Copies tensors with the rest: `Connection.send` would pass a file of shared memory for each, which takes ten
    times as long."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or not value.numel() or value.requires_grad:
            return NotImplemented
        if value.device.type != "cpu" or value.layout != torch.strided:
            return NotImplemented
        data = value.contiguous().view(-1).view(torch.uint8).numpy()
        return _tensor, (bytearray(data), value.dtype, value.shape)


def _tensor(data: bytearray, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.frombuffer(data, dtype=dtype).view(shape)


def _send(pipe: Connection, value: Any) -> None:
    data = io.BytesIO()
    _Pickler(data).dump(value)
    pipe.send_bytes(data.getbuffer())


def _receive(pipe: Connection) -> Any:
    return pickle.loads(pipe.recv_bytes())


class _RankPool:
    def __init__(self) -> None:
        self.processes: dict[int, Any] = {}
        self.pipes: dict[int, Connection] = {}
        self.folder, self.calls = tempfile.TemporaryDirectory(), itertools.count()

    def grow(self, world: int) -> None:
        for rank in set(range(world)) - self.processes.keys():
            self.pipes[rank], there = processes().Pipe()
            self.processes[rank] = processes().Process(target=_serve, args=(there,), daemon=True)
            self.processes[rank].start()
            there.close()

    def collect(self, world: int, timeout_s: float) -> list[Any]:
        waiting, results = {self.pipes[rank]: rank for rank in range(world)}, [None] * world
        deadline = Deadline(timeout_s)
        while waiting:
            ready = wait(list(waiting), timeout=deadline.left_s())
            if not ready and deadline.expired():
                self.stop(world)
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer in {deadline}")
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = _receive(pipe)  # type: ignore[arg-type]
                except EOFError:
                    ok, value = False, "the process died"
                if not ok:
                    self.stop(world)
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return results

    def stop(self, world: int | None = None) -> None:
        """Ends the processes of a group, or all."""
        for rank in sorted(self.processes)[:world]:
            process = self.processes.pop(rank)
            process.kill()
            process.join()
            self.pipes.pop(rank).close()


def _serve(pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")  # most pairs of ranks in a group never send anything
    import torch
    import torch.distributed as dist

    from fusion.npu import open_device

    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage: looking for some took longer than most tests
    devices: dict[str, Any] = {}
    while True:
        try:
            fn, rank, world, store, kind, args = _receive(pipe)
        except EOFError:
            return
        try:
            # What an earlier test left in reference cycles must not be freed while this one measures memory.
            gc.collect()
            if kind not in devices:
                late = {"kind": "emulated", "index": rank + 8, "streams": "adversarial"}
                opened = open_device(**late if kind == "adversarial" else {"kind": kind, "index": rank})
                devices[kind] = opened, opened.operators
            device, device.operators = devices[kind]  # the process may have served a test that has set others
            if device.kind == "emulated":
                torch.npu.set_device(device.index)  # the process may have served a test on its other card
            dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=world)
            result = fn(rank, device, *args)
            groups = [*dist.distributed_c10d._world.pg_map]
            dist.destroy_process_group()
            threading.Thread(target=groups.clear).start()  # gloo takes 10 ms to end each, in which it only waits
            _send(pipe, (True, result))
        except BaseException:
            _send(pipe, (False, traceback.format_exc()))


_pool = _RankPool()
atexit.register(_pool.stop)


def end_ranks() -> None:
    """End the processes that play ranks: the next ones have no process groups or memory of what ran before."""
    _pool.stop()
