"""Decide which process groups the cards of a run create, and what they take of a card. Pure, but for one function.

Invariants: cards that meet in several roles meet in one group, so that a card has one communicator and one full mesh of
gloo's sockets with the same others; gloo joins only the groups in which the host communicates. Cards that save a
checkpoint in the background have a group of their own beside these; operators that dispatch rows to experts, too."""

import resource
from collections import Counter
from dataclasses import dataclass

from fusion.colocate.spec import WorkerSpec
from fusion.model.parallel import CARD_ONLY, REPLAYED, Parallel

Groups = dict[tuple[int, ...], bool]
"""Members (ranks of the run) → whether the host communicates in it; in the order in which all cards create them"""
OTHER_FILES = 1024
"""Files and sockets that a card has open beside those of gloo: libraries, logs, Ray's and the cards' own connections"""
MOST_FILES = 1 << 20
"""Limit that is set where the system has none"""


@dataclass(frozen=True)
class GroupCost:
    """What the groups of a card take. ``sockets``: of gloo, in its process; ``communicators``: on the card, at most."""

    sockets: int
    communicators: int


def plan_groups(spec: WorkerSpec) -> Groups:
    """Return the groups of all meshes, and those that switch and read together."""
    deployment, groups = spec.deployment, Groups()
    meshes = [(spec.train, deployment.train), *((spec.infer_of_one_engine, ranks) for ranks in spec.engines)]
    if spec.reference is not None:
        meshes.append((spec.reference, deployment.reference))
    if spec.reward_model is not None:
        meshes.append((spec.reward_model.layout, deployment.reward_model))
    for parallel, ranks in meshes:
        groups = add_mesh(groups, parallel, ranks)
    if spec.algorithm.replay != "none":
        groups = add_mesh(groups, spec.train, deployment.train, card_only=CARD_ONLY - REPLAYED)
    together = [deployment.actor, deployment.train, *replicas(spec)]
    return groups | {members: True for members in together if len(members) > 1}


def plan_dispatch_groups(spec: WorkerSpec) -> list[tuple[int, ...]]:
    """Return the groups of the engines in which only operators that dispatch rows to experts communicate, on the cards
    alone: these share a communicator with no other operator."""
    groups = spec.infer_of_one_engine.dispatch_groups()
    return [tuple(ranks[place] for place in group) for ranks in spec.engines for group in groups]


def add_mesh(
    groups: Groups, parallel: Parallel, ranks: tuple[int, ...], card_only: frozenset[str] = CARD_ONLY
) -> Groups:
    """Return the groups with those of a mesh over ``ranks``; () has none."""
    added = dict(groups)
    for name, places in parallel.process_groups().items() if ranks else ():
        for members in (tuple(ranks[place] for place in group) for group in places if len(group) > 1):
            added[members] = added.get(members, False) or name not in card_only
    return added


def replicas(spec: WorkerSpec) -> list[tuple[int, ...]]:
    """Return for each replica all its ranks of all stages, the first rank of the first stage in front."""
    members: dict[int, list[int]] = {}
    for place, card in enumerate(spec.deployment.train):
        members.setdefault(spec.train.coordinate("replica", place), []).append(card)
    return [tuple(cards) for cards in members.values()]


def cost_of(spec: WorkerSpec) -> GroupCost:
    """Return what the groups take of the card that has the most of them."""
    sockets, communicators = Counter[int](), Counter[int]()
    saving = {spec.deployment.train: True}
    for members, host in [*plan_groups(spec).items(), *saving.items()]:
        for rank in members:
            sockets[rank] += (len(members) - 1) * host
    for members in (*plan_groups(spec), *plan_dispatch_groups(spec)):
        communicators.update(members)
    return GroupCost(max(sockets.values()), max(communicators.values(), default=0))


def raise_file_limit(spec: WorkerSpec) -> None:
    """Let this process open as many files as the system allows; raise ValueError if a card's groups take more."""
    needed = cost_of(spec).sockets + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ValueError(
            f"cluster.npus={spec.world}: a card opens up to {needed} files, of which {needed - OTHER_FILES} connect "
            f"its process groups, but may open {hard}: raise the hard limit (ulimit -Hn) of the shell that starts Ray"
        )
    if soft != hard and soft < MOST_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES if hard == resource.RLIM_INFINITY else hard, hard))
