"""What a roofline's seconds are made of."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from fusion.costmodel.roofline import Roofline


def counting(roofline: Roofline, what: str) -> Roofline:
    """Return a roofline whose seconds are `flops`, bytes of `hbm` or bytes of `links`: all else takes no time."""
    card = roofline.hardware
    flops, hbm, links = (1.0 if name == what else inf for name in ("flops", "hbm", "links"))
    free, whole = replace(card.layer_s, value=0.0), replace(card.forward_reached, value=1.0)
    made = replace(
        card,
        operators="plain",
        topology=replace(card.topology, bytes_per_s=(links,) * 4),
        reached=(whole,) * 4,
        **dict.fromkeys(("collective_s", "layer_s", "launch_s"), free),
        **dict.fromkeys(("forward_reached", "train_reached"), whole),
        flops=replace(card.flops, value=flops),
        hbm_bytes_per_s=replace(card.hbm_bytes_per_s, value=hbm),
    )
    return Roofline(roofline.shape, made, roofline.parallel)
