"""Measure a card in at most ten minutes: its operators, a decode step, a training step and the offload of a switch.

    python benchmarks/card.py --json card.json [--device auto] [--operators auto] [--only operators,decode]

A model of the shape of Qwen3-30B-A3B in bfloat16, with random weights, cut to as many layers as the card's memory
holds. Every figure stands beside its floor: the larger of its bytes at the rate of a copy on the card and of its
operations at that of one large matrix product, both measured in the same run.

operators: seconds and `over_floor` of operators of the card's table (`device.operators`).
decode: one token of each sequence: seconds a step and a layer, tokens/s, over_floor; vllm: the same of vLLM in a
process of its own, where it is installed and the card is a real one.
step: a profile of one decode step: kernels and microseconds of a layer, and of all that is outside of the layers.
train: forward, backward and update of one micro-batch: tokens/s, over_floor.
switch: optimizer states to the host and back, over one plain copy each way; a switch between layouts needs several
cards (benchmarks/switch.py).
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {part: f"benchmarks.card_sides:{part}" for part in ("operators", "decode", "step", "train", "switch")},
    [
        Option("device", "auto", smoke="emulated", help="a kind of fusion.npu"),
        Option("operators", "auto", help="a table of `device.operators`"),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("batch", 64, smoke=3, help="sequences that are decoded"),
        Option("context", 2048, smoke=20, help="tokens of each of them"),
        Option("steps", 32, smoke=2, help="decode steps of a round"),
        Option("tokens", 16384, smoke=64, help="tokens of a micro-batch, in sequences of an eighth"),
        Option("layers", 48, smoke=1, help="layers at most"),
        Option("divisor", 1, smoke=32),
        Option("copied_bytes", 1 << 30, smoke=1 << 16),
        Option("width", 8192, smoke=64),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
