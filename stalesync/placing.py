"""Assigns ranks to actors by where Ray has placed them."""

from __future__ import annotations

import re
from collections.abc import Sequence


def order_by_place(places: Sequence[tuple[str, list[str]]]) -> list[int]:
    """Returns the index of the card of rank 0, 1, …: node by node, card by card, so that neighbours by rank are
    neighbours by link.

    Args:
        places: of each card, its node's address and the names of its accelerators (none: in the given order).
    """

    def natural(text: str) -> list[tuple[int, int, str]]:
        words = re.findall(r"\d+|\D+", text)
        return [(0, int(word), "") if word.isdigit() else (1, 0, word) for word in words]

    return sorted(range(len(places)), key=lambda i: (natural(places[i][0]), [natural(n) for n in places[i][1]], i))


def check_cards(kind: str, world: int, cluster: dict[str, float]) -> None:
    """Raises:
    ValueError: the cluster has fewer cards than the run needs; Ray would wait for them for ever.
    """
    cards = {"npu": "NPU", "cuda": "GPU"}
    if kind in cards and (found := cluster.get(cards[kind], 0)) < world:
        raise ValueError(
            f"device.kind={kind} with cluster.npus={world}: Ray counts {found:.0f} such cards; "
            "join the cluster that has them (cluster.address), ask for fewer, or set device.kind=emulated"
        )
