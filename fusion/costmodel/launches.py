"""State how many operations a rank launches in a layer with experts: the floor of a step whose host starts each.

    step >= layers x launches of a layer x `Hardware.launch_s`

It is a floor beside the other times of a step, not one of them: the host launches while the card computes. The counts
are those of `python benchmarks/launches.py`; `tests/costmodel/test_launches.py` counts again. Layers without experts
are not counted, nor what is outside the layers: they have no floor. Over latents a decode step launches more for longer
contexts where they are not fused; stated is its count at 2,048 tokens."""

from dataclasses import dataclass

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.model.spec import Latent


@dataclass(frozen=True)
class Launches:
    """Launches of one layer: in a decode step, in one over latents, and in forward and backward pass of a micro-batch,
    without and with recomputation."""

    decode: int = 0
    decode_mla: int = 0
    train: int = 0
    train_recompute: int = 0

    def of_passes(self, passes: int) -> int:
        """Return the launches of a micro-batch: 1 pass is forward, 3 are forward and backward, 4 recompute, too. A pass
        less, where a frozen base has no gradients, saves none: those of its adapters take their place."""
        return {1: self.train_recompute - self.train, 2: self.train, 3: self.train, 4: self.train_recompute}[passes]


COUNTS = {
    "tp1": {
        "cuda": Launches(decode=36, decode_mla=66, train=98, train_recompute=133),
        "cuda_fused": Launches(decode=17, decode_mla=55, train=98, train_recompute=133),
        "ascend": Launches(decode=19, decode_mla=29, train=70, train_recompute=95),
    },
    "tp2ep2": {
        "cuda": Launches(decode=42, decode_mla=72, train=116, train_recompute=158),
        "cuda_fused": Launches(decode=19, decode_mla=57, train=116, train_recompute=158),
        "ascend": Launches(decode=25, decode_mla=35, train=88, train_recompute=118),
    },
}
"""Layout of the benchmark → table of operators → launches; other tables have no floor. Where only TP or EP splits a
layer, those of both are taken"""


def decode_floor_s(shape: Shape, hardware: Hardware, parallel: Parallel) -> float:
    """Return the seconds in which the host launches a decode step, stage by stage."""
    counts, is_latent = launches_of(hardware.operators, parallel), isinstance(shape.config.attention, Latent)
    count = counts.decode_mla if is_latent else counts.decode
    return shape.config.num_sparse_layers * count * hardware.launch_s.value


def launches_of(operators: str, parallel: Parallel) -> Launches:
    """Return the launches of a layer on a rank with a table of operators in a layout."""
    layout = "tp2ep2" if parallel.tp * parallel.ep * parallel.etp > 1 else "tp1"
    return COUNTS[layout].get(operators, Launches())
