"""Give vLLM the process groups of a mesh, instead of those that it would create over the whole world.

vLLM numbers its ranks from 0 and takes every process of the world for one engine. Here an engine may be any ranks of
the world, and creating its groups again would be collective over ranks that host no engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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

    with ExitStack() as patches:
        patches.enter_context(patch.object(worker, "init_distributed_environment", init))
        with suppress(ImportError):  # the worker of Ascend imports it by name
            import vllm_ascend.worker.worker as ascend

            patches.enter_context(patch.object(ascend, "init_distributed_environment", init))
            patches.enter_context(patch.object(ascend, "init_ascend_model_parallel", lambda *_: None))
        yield


def _set_groups(mesh: Mesh, local_rank: int, backend: str) -> None:
    import vllm.distributed.parallel_state as state
    from vllm.config import get_current_vllm_config

    if not dist.is_initialized():  # vLLM needs groups also of a single card
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    config = get_current_vllm_config()
    by_argument = hasattr(config.parallel_config, "use_all2all")  # of vLLM 0.26 the group's name decides
    alone = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
    world = mesh.world_group or alone

    def coordinator(name: str, group: dist.ProcessGroup | None, communicates: bool = True) -> Any:
        """Return vLLM's coordinator of a group that exists."""
        group = group or alone
        all2all = {"use_all2all": name == "ep" and config.parallel_config.use_all2all} if by_argument else {}
        members = dist.get_process_group_ranks(group)
        with patch.object(state.torch.distributed, "new_group", lambda *_, **__: group):
            return state.GroupCoordinator(
                group_ranks=[members],
                local_rank=local_rank,
                torch_distributed_backend=backend,
                use_device_communicator=communicates,
                group_name=name,
                **all2all,
            )

    state._WORLD = state._INNER_DP_WORLD = coordinator("world", world, communicates=False)
    state._NODE_COUNT = 1
    state._TP = coordinator("tp", mesh.tp_group)
    state._DCP, state._PCP, state._PP = (coordinator(name, None) for name in ("dcp", "pcp", "pp"))
    state._DP = coordinator("dp", mesh.dp_group)
    if config.model_config.is_moe:
        state._EP = coordinator("ep", world)
    if backend == "hccl":  # vllm-ascend would derive it from the whole world
        import vllm_ascend.distributed.parallel_state as ascend

        ascend._MC2 = coordinator("mc2", world)
