"""Assign ranks to actors by their placement on nodes and cards, and emulated cards to nodes. Pure."""

import re
from collections.abc import Sequence


def order_by_place(places: Sequence[tuple[str, list[str]]]) -> list[int]:
    """Return the index of the card of rank 0, 1, …: node by node, card by card, so that consecutive ranks have fast
    links. ``places``: each card's node address and accelerators (none: in the given order)."""

    def natural(text: str) -> list[tuple[int, int, str]]:
        parts = re.findall(r"\d+|\D+", text)
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]

    return sorted(range(len(places)), key=lambda i: (natural(places[i][0]), [natural(n) for n in places[i][1]], i))


def check_cards(kind: str, world: int, cluster: dict[str, float]) -> None:
    """Raise ValueError if the cluster has fewer cards than the run needs: Ray would wait for them without a timeout."""
    resources = {"npu": "NPU", "cuda": "GPU"}
    if kind in resources and (num_cards := cluster.get(resources[kind], 0)) < world:
        raise ValueError(
            f"device.kind={kind} with cluster.npus={world}: Ray counts {num_cards:.0f} such cards; "
            "join a cluster with enough cards (cluster.address), reduce cluster.npus, or set device.kind=emulated"
        )


def spread(world: int, nodes: Sequence[str]) -> list[str]:
    """Return the node of each emulated card, evenly, neighbours together: Ray would place them at random."""
    return [nodes[index * len(nodes) // world] for index in range(world)]
