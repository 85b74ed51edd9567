"""Decide the environment in which the processes of real cards start. Imports only Python's own modules.

    kind of card, cards and communicators of the plan ─► card_environment ─► processes that start: before torch_npu

Invariants: what the user has exported is never changed; the buffers of all communicators of a card together take at
most HCCL_BYTES, which is half of what the cost model leaves to the runtime of an Ascend card. docs/howto/ascend.md has
the source of every variable."""

import glob
import os
from collections.abc import Iterable, Mapping, Sequence

HCCL_BYTES = 2 << 30
"""HBM of a card for the buffers of HCCL's communicators"""
MAX_BUFFER_MB = 200
"""HCCL's own default"""
CONNECT_TIMEOUT_S = (120, 7200)
"""HCCL's own default, and its maximum"""

DETERMINISTIC = {"npu": {"HCCL_DETERMINISTIC": "true"}, "cuda": {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}}
"""Kind of card → what makes its collectives and products repeatable to the bit"""


def card_files() -> list[str]:
    """Return the device files of this host's Ascend cards."""
    return glob.glob("/dev/davinci[0-9]*")


def card_environment(
    kind: str, *, cards: int = 1, communicators: int = 1, deterministic: bool = False
) -> dict[str, str]:
    """Return the variables of a kind of card (`npu`, `cuda`, `emulated`). ``cards``: of the run: the more there are,
    the longer the last one takes to come; ``communicators``: of the card that has the most; ``deterministic``:
    `device.deterministic`."""
    variables = DETERMINISTIC.get(kind, {}) if deterministic else {}
    if kind != "npu":
        return dict(variables)
    buffer_mb = min(MAX_BUFFER_MB, HCCL_BYTES // (2 << 20) // max(1, communicators))  # one to send, one to receive
    return {
        **variables,
        "HCCL_BUFFSIZE": str(max(1, buffer_mb)),
        "HCCL_CONNECT_TIMEOUT": str(min(CONNECT_TIMEOUT_S[0] + 2 * cards, CONNECT_TIMEOUT_S[1])),
        "HCCL_OP_EXPANSION_MODE": "AIV",
        "TASK_QUEUE_ENABLE": "1",
    }


def cores_of(card: str, cards: Sequence[str], cores: Iterable[int]) -> set[int]:
    """Return the part of a host's cores that the process of a card keeps to: as many for each card of the host, in the
    order of their numbers; all of them if there are fewer cores than cards, or the host does not have the card. Ray
    shows a process its card as number 0, from which torch_npu's own `CPU_AFFINITY_CONF` would give every process of a
    host the same cores."""
    cores, in_order = sorted(cores), sorted(cards, key=int)
    share = len(cores) // max(1, len(cards))
    if not share or card not in in_order:
        return {*cores}
    first = in_order.index(card) * share
    return {*cores[first : first + share]}


def bind_to_cores(kind: str, card: str) -> None:
    """Keep this process, and the threads that it starts from now on, to the cores of its card, unless the user binds
    processes. Only of Ascend cards, whose operators wait for the host."""
    if kind == "npu" and "CPU_AFFINITY_CONF" not in os.environ:
        cards = [path.removeprefix("/dev/davinci") for path in card_files()]
        os.sched_setaffinity(0, cores_of(card, cards, os.sched_getaffinity(0)))


def exported_here() -> dict[str, str]:
    """Return what this process's environment has of the variables that `card_environment` sets."""
    names = {name for kind in DETERMINISTIC for name in card_environment(kind, deterministic=True)}
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}


def without(variables: Mapping[str, str], exported: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in exported}


def describe(variables: Mapping[str, str], exported: Mapping[str, str]) -> str:
    """Format the variables with the values that take effect in an environment."""
    return ", ".join(
        f"{name}={exported[name]} (exported)" if name in exported else f"{name}={value}"
        for name, value in variables.items()
    )
