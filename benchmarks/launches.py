"""Count what a card's operators cost beside their arithmetic, on the emulated NPU: no card is needed.

logprobs: peak bytes of log-probabilities and entropies with their gradients, of one micro-batch in bfloat16, from the
allocator: beyond the hidden states, the head and the gradients of both. planned_bytes: the cost model's estimate.
whole_bytes: what whole logits would take, at 18 bytes each. The hidden size, which changes none of them, is small.

decode, decode_mla: launches of one layer in a decode step, by table of operators, on one rank (tp1) and on that of two
that launches most (tp2ep2), and the copies for which the host waits in a whole step. train: launches of one layer in
the forward and the backward pass of one micro-batch of sequences of different lengths, and how often the host waits in
a layer; where routing is replayed, with recomputation.

contracts: calls of Ascend's operators that are checked against torch_npu's wheels, which it downloads; those that fail.
"""

from benchmarks.harness import Arguments, Benchmark, Figures, Option

LAUNCHES = {
    "decode.cuda": {"tp1": 36, "tp2ep2": 44},
    "decode.cuda_fused": {"tp1": 20, "tp2ep2": 26},
    "decode.ascend": {"tp1": 20, "tp2ep2": 26},
    "decode_mla.ascend": {"tp1": 30, "tp2ep2": 36},
    "train.cuda": {"tp1": 110, "tp1_recompute": 150, "tp2ep2": 140, "tp2ep2_recompute": 180},
    "train.ascend": {"tp1": 75, "tp1_recompute": 100, "tp2ep2": 105, "tp2ep2_recompute": 130},
}
"""At most, of a layer, by table of operators and layout"""

BENCHMARK = Benchmark(
    __doc__,
    [Option("operations", False, help="print the operations of a layer")],
    "contracts.failed <= 0, logprobs.peak_bytes <= 2e9, decode.[ac]*.host_syncs <= 1, train.[ac]*.host_syncs <= 0, "
    "train.[ac]*.host_syncs_tp2ep2 <= 1, train.[ac]*.host_syncs_tp2ep2_replay <= 0, "
    + ", ".join(f"{path}.{key} <= {most}" for path, by_key in LAUNCHES.items() for key, most in by_key.items()),
    parts={"logprobs": "logprobs", "contracts": "tests.npu.contracts.wheel:figures"}
    | {part: f"tests.costmodel.launch_counts:{part}" for part in ("decode", "decode_mla", "train")},
    sizes={"rows": (16384, 512), "ids": (151936, 8192), "channels": (16, 16)}
    | {"batch": (64, 4), "contexts": ([2048, 32768], [300]), "sequences": (64, 5)},
)
BENCHMARK.run_as(__name__)

import torch

from fusion.costmodel.memory import WEIGHT_BYTES, logprob_bytes
from fusion.model import Head, Mesh
from fusion.npu import open_device
from fusion.training.logprobs import vocab_parallel_logprobs

CAPACITY_BYTES = 16 << 30
WHOLE_LOGIT_BYTES = 18
"""Bytes of a logit, its float32 copies and its exponentials where none is freed before the last is computed."""


def logprobs(args: Arguments) -> Figures:
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
