"""Start vLLM in this process, on this rank's card and in the engine's process groups.

    ModelConfig ─► config.json ─► VllmConfig ─► vLLM's worker ─► model runner ─► nn.Module
    Mesh ────────► groups of vLLM (vllm_groups)      │
    RolloutConfig ► limits                           └─ KV cache: allocated on our `Device`, owner "kv"

Every rank has vLLM's worker and its scheduler (its "external launcher"); no process and no socket is added. vLLM's
`EngineCore` is not used: around scheduler and worker it freezes the garbage collector's heap and owns queues that an
engine stepped by its caller does not need."""

from __future__ import annotations

import json
import os
import random
import secrets
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.backends.support import computes_on_host, engine_options
from fusion.inference.backends.vllm_groups import use_groups
from fusion.inference.config import RolloutConfig
from fusion.model import Mesh, ModelConfig
from fusion.npu import Device

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler is in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # other processes share the cores
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_MLA_DISABLE": "0",  # see `start`
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # its memory would outlive the weights, and needs to see the other cards
    "VLLM_ASCEND_ENABLE_NZ": "0",  # weights in a private format could not be written by slices
    "VLLM_ASCEND_ENABLE_MLAPO": "0",  # would compute from further copies of the weights of latent attention
}
"""What vLLM reads from environment variables, at its import and later"""


_STATED: dict[str, dict[str, Any]] = {"deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}}
"""Fields by family that vLLM reads although transformers, which has only one value for them, does not write them"""

_REPLACED: dict[Any, tuple[str, ...]] = {
    torch: ("set_num_threads", "Event"),
    torch.cuda: ("Event", "Stream", "set_stream", "current_stream"),
    torch.accelerator: ("synchronize", "empty_cache", "get_memory_info"),
    torch.Tensor: ("pin_memory", "record_stream"),
}
"""Functions of torch that vLLM for the CPU replaces for the whole process by ones that do nothing"""


@dataclass
class VllmCore:
    """One rank's vLLM.
    ``vllm_config``: vLLM's `VllmConfig`.
    ``executor``: runs the worker: `execute_model` and `sample_tokens`.
    ``runner``: the worker's model runner.
    ``module``: the model; its parameters hold dummy weights until others take their place.
    ``scheduler``: of this rank; None while no KV cache is allocated. TP ranks must feed theirs alike."""

    vllm_config: Any
    executor: Any
    runner: Any
    module: torch.nn.Module
    device: Device
    scheduler: Any = None

    def __post_init__(self) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_kv_cache_groups, get_request_block_hasher, init_none_hash
        from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
        from vllm.v1.structured_output import StructuredOutputManager

        register_all_kvcache_specs(self.vllm_config)
        (specs,) = self.executor.get_kv_cache_specs()
        self._kv_groups = get_kv_cache_groups(self.vllm_config, specs)
        self._structured_output = StructuredOutputManager(self.vllm_config)
        cache, self.block_hasher = self.vllm_config.cache_config, None
        if cache.enable_prefix_caching:
            hash_fn = get_hash_fn_by_name(cache.prefix_caching_hash_algo)
            init_none_hash(hash_fn)
            self.block_hasher = get_request_block_hasher(cache.block_size, hash_fn)
        self._kv: list[torch.Tensor] = []
        self._raw_kv: list[torch.Tensor] = []
        """Host views of `_kv`, [blocks, bytes]"""
        self._clean = 0
        """Blocks whose content is finite"""
        self._captured: list[int] = []
        """Addresses that the graphs read, of weights and KV; []: no graph is captured"""
        with self._kv_on_card(1):
            self.executor.initialize_from_config([self._kv_config(1)])
        self.release_kv()

    @property
    def _ascend(self) -> bool:
        return hasattr(self.runner, "_allocate_int8_cache_tensor")

    @property
    def block_size(self) -> int:
        """Tokens of a KV block: that of the config, unless the card's attention has another (Ascend: 128)."""
        return self.vllm_config.cache_config.block_size

    @property
    def kv_block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(tensor.size for tensor in self._kv_config(1).kv_cache_tensors)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that requests can get."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def allocate_kv(self, blocks: int) -> None:
        """Allocate a KV cache of ``blocks`` on the card, and one more that vLLM never uses; owner "kv". Unfinished
        requests wait in a new scheduler."""
        from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
        from vllm.v1.core.sched.scheduler import Scheduler

        assert not self._kv, "the KV cache is allocated"
        config, runner, cache = self._kv_config(blocks + 1), self.runner, self.vllm_config.cache_config
        runner.kv_cache_config, cache.num_gpu_blocks = config, config.num_blocks
        runner.kv_caches.clear()
        with self._kv_on_card(config.num_blocks):
            runner.initialize_kv_cache_tensors(config, *(() if self._ascend else (runner._kernel_block_sizes,)))
        old = self.scheduler
        self.scheduler = Scheduler(
            vllm_config=self.vllm_config,
            kv_cache_config=generate_scheduler_kv_cache_config([config]),
            structured_output_manager=self._structured_output,
            block_size=cache.block_size,
            hash_block_size=cache.block_size,
        )
        if old is not None:
            self.scheduler.finished_req_ids |= old.finished_req_ids
            for request in list(old.waiting):
                self.scheduler.add_request(request)

    def release_kv(self) -> None:
        """Release the KV cache. Unfinished requests keep their tokens, and wait."""
        if self.scheduler is not None:
            self.scheduler.reset_prefix_cache(reset_running_requests=True)
        for layer in self.runner.compilation_config.static_forward_context.values():
            if getattr(layer, "kv_cache", None) is not None:
                layer.kv_cache = torch.empty(0)
        self.runner.kv_caches.clear()
        self._drop_graphs()
        for tensor in self._kv:
            tensor.untyped_storage().resize_(0)
        self._kv, self._raw_kv = [], []

    def clean(self, block: int) -> None:
        """Make the content of all blocks up to this one finite, for any previous content of the memory, as
        `KVCache.clean` does: pages of the host are first touched here."""
        if block >= self._clean:
            end = min(len(self._raw_kv[0]), max(block + 1, 2 * self._clean))
            for blocks in self._raw_kv:
                blocks[self._clean : end].zero_()
            self._clean = end

    def dummy_pass(self, num_tokens: int) -> None:
        """Run a dummy batch through the model, without attention and never as a graph. Collective."""
        from vllm.config import CUDAGraphMode

        self.runner._dummy_run(num_tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE)

    def graphs_read(self, weights: list[int]) -> bool:
        """Return whether the graphs, if there are to be any, read the weights at these addresses and this KV cache."""
        return self.vllm_config.model_config.enforce_eager or self._captured == self._addresses(weights)

    def capture(self, weights: list[int]) -> None:
        """Capture the graphs of decode steps again, which read the weights at these addresses. Collective."""
        self._drop_graphs()
        self.dummy_pass(self.runner.max_num_tokens)  # workspaces may not grow once graphs read them
        self.runner.capture_model()
        self._captured = self._addresses(weights)

    def _addresses(self, weights: list[int]) -> list[int]:
        return weights + [tensor.data_ptr() for tensor in self._kv]

    def _drop_graphs(self) -> None:
        if self._captured:
            from vllm.compilation.cuda_graph import CUDAGraphWrapper

            CUDAGraphWrapper.clear_all_graphs()
            self._captured = []

    def _kv_config(self, blocks: int) -> Any:
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_uniform_page_size

        page_bytes = get_uniform_page_size([group.kv_cache_spec for group in self._kv_groups])
        layers = max(len(group.layer_names) for group in self._kv_groups)
        return get_kv_cache_config_from_groups(self.vllm_config, self._kv_groups, page_bytes * layers * blocks)

    @contextmanager
    def _kv_on_card(self, num_blocks: int) -> Iterator[None]:
        """Make the runner allocate its KV on our card: vLLM's layer by layer, vllm-ascend's keys and values apart."""
        runner, device, raw = self.runner, self.device, list[torch.Tensor]()

        def on_card(nbytes: int, *_: Any) -> torch.Tensor:
            with device.owner("kv"):
                self._kv.append(torch.empty(nbytes, dtype=torch.int8, device=device.torch_device))
            raw.append(device.host_view(self._kv[-1]))
            return raw[-1]

        def by_layer(config: Any) -> dict[str, torch.Tensor]:
            layers = ((wanted.shared_by, on_card(wanted.size)) for wanted in config.kv_cache_tensors)
            return {layer: view for shared_by, view in layers for layer in shared_by}

        replaced = (
            ("_allocate_int8_cache_tensor", on_card) if self._ascend else ("_allocate_kv_cache_tensors", by_layer)
        )
        with patch.object(runner, *replaced):
            yield
        device.synchronize()
        self._raw_kv, self._clean = [view.view(num_blocks, -1) for view in raw], 0
        # On a card a block's bytes may lie apart, and there is no page to touch: all blocks at once.
        self.clean(0 if raw[0].device.type == "cpu" else num_blocks - 1)


def start(
    config: ModelConfig,
    mesh: Mesh,
    device: Device,
    rollout: RolloutConfig,
    dtype: torch.dtype = torch.float32,
    load: Callable[[torch.nn.Module], None] | None = None,
    *,
    routing: bool = False,
) -> VllmCore:
    """Start vLLM on this rank, with dummy weights and without a KV cache. Collective over the mesh. A process has one
    at a time: vLLM keeps its process groups in global variables. ``load``: loads weights into the model in place of the
    dummy ones, before vLLM processes what was loaded. ``routing``: record the experts of every token (`vllm_routing`).
    Raise ImportError: vLLM is not installed."""
    with _unchanged_process():
        # vLLM for the CPU attends to keys and values of heads instead of latents.
        os.environ.update(ENVIRONMENT | {"VLLM_MLA_DISABLE": str(int(computes_on_host(device.kind)))})
        import vllm.v1.executor.uniproc_executor as executors

        if computes_on_host(device.kind):
            from fusion.inference.backends.vllm_host import compute_from_plain_tensors, pad_heads, record_in_experts

            compute_from_plain_tensors()
            pad_heads()
            record_in_experts()
        name = _shared_name(mesh)

        class InProcess(executors.ExecutorWithExternalLauncher):
            """vLLM's executor in one process per rank, with our rank and, for shared memory, a name of its own."""

            def _distributed_args(self) -> tuple[str, int, int]:
                return f"rlfusion:{name}", mesh.rank, device.index

        options = engine_options(device.kind, rollout.engine.graphs) | {"enable_return_routed_experts": routing}
        vllm_config = _vllm_config(config, mesh, rollout, dtype, options)
        if load is not None:
            vllm_config.load_config.load_format = _loader(load)
        with use_groups(mesh):
            executor = InProcess(vllm_config)
        runner = executor.driver_worker.worker.model_runner
        return VllmCore(vllm_config, executor, runner, runner.get_model(), device)


def _loader(load: Callable[[torch.nn.Module], None]) -> str:
    """Return vLLM's name of a loader that loads dummy weights, and then these."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    name = "rlfusion"

    @register_model_loader(name)
    class Loader(DummyModelLoader):
        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            super().load_weights(model, model_config)
            load(model)

    return name


def _vllm_config(
    config: ModelConfig, mesh: Mesh, rollout: RolloutConfig, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    from vllm import EngineArgs

    parallel, name = mesh.parallel, str(dtype).removeprefix("torch.")
    with tempfile.TemporaryDirectory() as folder:
        fields = config.to_hf(name) | _STATED.get(config.family, {})
        Path(folder, "config.json").write_text(json.dumps(fields))
        os.environ["RANK"] = str(mesh.rank)  # from which vLLM computes the rank of data parallelism
        return EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            generation_config="vllm",
            load_format="dummy",
            dtype=name,  # type: ignore[arg-type]
            seed=0,
            async_scheduling=False,
            max_model_len=rollout.length_limit(config.max_positions),
            block_size=rollout.engine.block_size,
            max_num_seqs=rollout.engine.max_seqs,
            max_num_batched_tokens=max(rollout.engine.max_batch_tokens, rollout.engine.max_seqs),
            enable_prefix_caching=rollout.engine.prefix_cache,
            enable_chunked_prefill=True,
            scheduling_policy="priority",
            disable_log_stats=True,
            kv_cache_memory_bytes=1 << 20,  # not allocated: `allocate_kv` does
            tensor_parallel_size=parallel.tp,
            data_parallel_size=parallel.world // parallel.tp,
            enable_expert_parallel=parallel.ep > 1,
            distributed_executor_backend="external_launcher",
            additional_config={"weight_nz_mode": 0},
            **options,
        ).create_engine_config()


def _shared_name(mesh: Mesh) -> str:
    """Return a random name, the same on all ranks and different from any other engine's of the machine. Collective."""
    name = torch.tensor([secrets.randbits(62)])
    if mesh.world_group is not None:
        dist.broadcast(name, group=mesh.world_group, group_src=0)
    return f"{int(name):x}"


@contextmanager
def _unchanged_process() -> Iterator[None]:
    """Undo what vLLM changes of the process while it starts: environment variables (libraries to preload into child
    processes among them), random states, and functions of torch that it replaces."""
    environment = dict(os.environ)
    replaced = [(owner, name, getattr(owner, name)) for owner, names in _REPLACED.items() for name in names]
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        for name in os.environ.keys() - environment.keys() - ENVIRONMENT.keys():
            del os.environ[name]
        os.environ.update({name: value for name, value in environment.items() if name not in ENVIRONMENT})
