"""Capture and replay what runs on the emulated card, with the names of torch_npu's graphs.

    with graph(g): y = f(x)     f runs, and every operator that it calls is kept with its arguments
    g.update([{name: value}])   other values of host arguments of `UPDATED` operators
    x.copy_(…); g.replay()      the operators run again; what they return is written to where it was the first time

What the host computes during a capture is computed once, as on a card: a number that it read, a shape, a list. Reading
the card, or a tensor of the host, raises. Unlike a card's, a graph keeps all that was allocated in between, and a
capture computes."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

UPDATED = ("npu_fused_infer_attention_score",)
"""Operators whose host arguments `NPUGraph.update` changes"""

WAITS = {getattr(torch.ops.aten, name).default for name in ("is_nonzero", "lift_fresh")}
"""Operators beside those that are tagged which read a number of the card, or make a tensor of it from the host's"""

Call = tuple[Any, tuple, dict[str, Any], Any, list[int]]
"""An operator, its arguments, what it returned, and the addresses of its arguments"""


class NPUGraph:
    """A recorded sequence of operators."""

    def __init__(self) -> None:
        self._calls: list[Call] = []

    def replay(self) -> None:
        with torch.inference_mode():
            for function, args, kwargs, returned, addresses in self._calls:
                if [x.data_ptr() for x in _tensors((args, kwargs))] != addresses:
                    raise RuntimeError(f"{function}: memory that the graph reads has moved since it was captured")
                again = function(*args, **kwargs)
                for work in (leaf for leaf in tree_leaves(again) if isinstance(leaf, torch.ScriptObject)):
                    dist.Work.unbox(work).wait()  # of a collective
                for kept, new in zip(_tensors(returned), _tensors(again), strict=True):
                    if kept.data_ptr() != new.data_ptr():
                        kept.copy_(new)

    def update(self, cpu_update_input: list[Mapping[str, Any]]) -> None:
        """Change keyword arguments: one mapping for each call of an operator of `UPDATED`, or one for all."""
        calls = [call for call in self._calls if call[0].overloadpacket.__name__ in UPDATED]
        if len(cpu_update_input) not in (1, len(calls)):
            raise RuntimeError(f"{len(calls)} operators are updated, and {len(cpu_update_input)} are given")
        for number, (_, _, kwargs, *_) in enumerate(calls):
            changes = cpu_update_input[number if len(cpu_update_input) > 1 else 0]
            kwargs |= {name: value for name, value in changes.items() if name in kwargs}

    def pool(self) -> tuple[int, int]:
        return 0, 0

    def reset(self) -> None:
        self._calls.clear()


class graph(TorchDispatchMode):  # noqa: N801
    """Context manager: capture into ``npu_graph``. The other arguments are those of a card, and change nothing."""

    def __init__(
        self,
        npu_graph: NPUGraph,
        pool: Any = None,
        stream: Any = None,
        auto_dispatch_capture: bool = False,
        capture_error_mode: str = "global",
    ) -> None:
        super().__init__()
        self._calls = npu_graph._calls

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        inputs = list(_tensors((args, kwargs)))
        waits = any(x.device.type == "npu" for x in inputs) and _waits(func, inputs)
        returned = None if waits else func(*args, **kwargs)
        outputs = list(_tensors(returned))
        kinds = {x.device.type for x in (*inputs, *outputs) if x.dim() or x.device.type != "cpu"}
        if waits or len(kinds) > 1:
            raise RuntimeError(f"{func}: operation not permitted when stream is capturing: the host takes part in it")
        if "npu" not in kinds:
            return returned
        if func._schema.is_mutable or func.namespace != "aten" or not _are_views(outputs, inputs):
            self._calls.append((func, args, kwargs, returned, [x.data_ptr() for x in inputs]))
        return returned


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _waits(function: Any, inputs: list[torch.Tensor]) -> bool:
    """Return whether the host waits for a number of the card: a result, or the length of one."""
    if function is torch.ops.aten.index.Tensor:
        return any(x.dtype in (torch.bool, torch.uint8) for x in inputs[1:])
    return function in WAITS or not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}.isdisjoint(
        function.tags
    )


def _are_views(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> bool:
    storages = {x.untyped_storage()._cdata for x in inputs}
    return all(x.untyped_storage()._cdata in storages for x in outputs)
