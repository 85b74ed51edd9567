"""Give vLLM the process groups of a mesh, instead of those that it would create over the whole world.

vLLM numbers its ranks from 0 and takes every process of the world for one engine. Here an engine may be any ranks of
the world, and creating its groups again would be collective over ranks that host no engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

from fusion.model import Mesh


@contextmanager
def use_groups(mesh: Mesh) -> Iterator[None]:
    """Make vLLM's worker use the groups of ``mesh`` while it starts. Collective over the mesh."""
    import vllm.v1.worker.gpu_worker as worker

    def init(world_size: int, rank: int, init_method: str, local_rank: int, backend: str, *_: Any) -> None:
        _set_groups(mesh, local_rank, backend)

    patches = [patch.object(worker, "init_distributed_environment", init)]
    try:  # the worker of Ascend imports it by name
        import vllm_ascend.worker.worker as ascend

        patches.append(patch.object(ascend, "init_distributed_environment", init))
    except ImportError:
        pass
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _set_groups(mesh: Mesh, local_rank: int, backend: str) -> None:
    import vllm.distributed.parallel_state as state
    from vllm.config import get_current_vllm_config

    if not dist.is_initialized():  # vLLM needs groups also of a single card
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = get_current_vllm_config()
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    world = mesh.world_group or alone

    def coordinator(
        name: str, group: dist.ProcessGroup | None, all2all: bool = False, communicates: bool = True
    ) -> Any:
        """Return vLLM's coordinator of a group that exists."""
        group = group or alone
        members = dist.get_process_group_ranks(group)
        with patch.object(state.torch.distributed, "new_group", lambda *_, **__: group):
            return state.GroupCoordinator(
                group_ranks=[members],
                local_rank=local_rank,
                torch_distributed_backend=backend,
                use_device_communicator=communicates,
                group_name=name,
                use_all2all=all2all,
            )

    if mesh.parallel.dp > 1:
        from fusion.inference.backends.vllm_host import exchange_uneven

        exchange_uneven()
    state._WORLD = state._INNER_DP_WORLD = coordinator("world", world, communicates=False)
    state._NODE_COUNT = 1
    state._TP = coordinator("tp", mesh.tp_group)
    state._DCP, state._PCP, state._PP = (coordinator(name, None) for name in ("dcp", "pcp", "pp"))
    state._DP = coordinator("dp", mesh.dp_group)
    if config.model_config.is_moe:
        state._EP = coordinator("ep", world, all2all=config.parallel_config.use_all2all)
