"""Operations on small tensors, timed by `benchmarks/emulator.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch


def operations(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return operations on small tensors, whose time is mostly dispatch rather than the kernel."""
    x_BD, y_BD, out_BD = (torch.randn(16, 16, device=device) for _ in range(3))
    parameters = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    index_B = torch.arange(16, device=device)

    def train() -> None:
        (torch.nn.functional.silu(x_BD @ parameters[0]) @ parameters[1]).sum().backward()

    return {
        "add": lambda: x_BD + y_BD,
        "add_out": lambda: torch.add(x_BD, y_BD, out=out_BD),
        "mul_": lambda: out_BD.mul_(1.0),
        "matmul": lambda: x_BD @ y_BD,
        "view": lambda: x_BD.view(-1),
        "empty": lambda: torch.empty(16, 16, device=device),
        "index": lambda: x_BD[index_B],
        "cat": lambda: torch.cat([x_BD, y_BD]),
        "forward_backward": train,
        "adamw_step": optimizer.step,
    }
