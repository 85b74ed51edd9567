"""Measure the memory of log-probabilities for `benchmarks/launches.py`."""

from __future__ import annotations

from argparse import Namespace

import torch

from benchmarks.harness import Figures
from fusion.costmodel.memory import WEIGHT_BYTES, logprob_bytes
from fusion.model import Head, Mesh
from fusion.npu import open_device
from fusion.training.logprobs import vocab_parallel_logprobs

CAPACITY_BYTES = 16 << 30
WHOLE_LOGIT_BYTES = 18
"""Bytes of a logit, its float32 copies and its exponentials where none is freed before the last is computed."""


def peak(args: Namespace) -> Figures:
    """Measure one micro-batch, forward and backward."""
    torch.manual_seed(0)
    device = open_device("emulated", capacity_bytes=CAPACITY_BYTES)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=device.torch_device).requires_grad_()

    hidden, weight = random(args.rows, args.channels), random(args.ids, args.channels)
    targets = torch.randint(args.ids, (args.rows,)).to(device.torch_device)
    before = device.memory().allocated
    device.reset_peak()
    values = vocab_parallel_logprobs(hidden, Head([weight]), targets, Mesh.single())
    (values.logprobs.mean() + values.entropy.mean()).backward()
    device.synchronize()
    gradients = hidden.nbytes + weight.nbytes
    copied = WEIGHT_BYTES * args.rows * args.channels  # of the trained rows, which the caller makes
    return {
        "peak_bytes": device.memory().peak_allocated - before - gradients,
        "planned_bytes": logprob_bytes(args.rows, args.ids, args.channels) - gradients - copied,
        "whole_bytes": WHOLE_LOGIT_BYTES * args.rows * args.ids,
    }
