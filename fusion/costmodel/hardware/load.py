"""Define the constants of an accelerator node, and load a card's YAML file, strictly: every constant
is there, is a finite number > 0 in a known unit, has a source.

    operators:  the card's table of `fusion/npu/operators`
    topology:   dies_per_card, dies_per_node, dies_per_supernode (null: no supernodes), host link, source
    links:      card, node, supernode, network: peak bandwidth one way of one die, and the share of it that is reached
    constants:  the other fields of `Hardware`
    like:       another card, which has what the file does not state

A level of `links` that the machine does not have is left out of its file, and has to be: its entry in the Topology
repeats that of the node, so that plans see one class of links where there is one."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from fusion.ep_switch.topology import LEVELS, Topology
from fusion.npu.config import OPERATORS


@dataclass(frozen=True)
class Figure:
    """A constant and its source; ``assumed``: no published value was found, the source explains the assumption.
    ``least``: the lowest value that a published run implies, where it is far lower."""

    value: float
    source: str
    assumed: bool = False
    least: float | None = None

    def __str__(self) -> str:
        return f"assumed: {self.source}" if self.assumed else self.source


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator node. Bytes, bytes/s, seconds; a die is what one worker has."""

    name: str
    operators: str
    """Table of operators of `fusion/npu/operators` that such a card has"""
    topology: Topology
    reached: tuple[Figure, ...]
    """Share of a link's bandwidth that a large transfer reaches, by level of the topology."""
    collective_s: Figure
    """Latency of one exchange between all dies, independent of its size."""
    hbm_bytes: Figure
    """HBM of a die."""
    reserved_bytes: Figure
    """Part of the HBM that the runtime holds before the first tensor."""
    hbm_bytes_per_s: Figure
    """Bytes a copy reads and writes in a second, both counted."""
    flops: Figure
    """Dense bf16 operations of one die in a second."""
    forward_reached: Figure
    """Share of `flops` that a compute-bound forward pass reaches."""
    train_reached: Figure
    """Share of `flops` that a training step reaches, transfers and the pipeline's bubble left out."""
    layer_s: Figure
    """Time of a layer in an engine's step in addition to reads, arithmetic and exchanges: launches, the host."""
    launch_s: Figure
    """Time in which the host starts one operation of the card: a floor of steps beside all else (`launches.py`)."""
    out_bytes_per_s: Figure
    """Bandwidth from a die to pinned host memory while all dies of the node copy."""
    back_bytes_per_s: Figure
    """Bandwidth from pinned host memory to a die while all dies of the node copy."""
    host_bytes: Figure
    """Host memory of one node."""
    host_copy_bytes_per_s: Figure
    """Bandwidth of one core that copies within host memory, for which an unpinned copy waits."""
    unmap_bytes_per_s: Figure
    """Rate at which the caching allocator releases HBM (`empty_cache`)."""

    def link_bytes_per_s(self, level: int) -> float:
        """Return the bandwidth that one die reaches over a link of a level of the topology, one way."""
        return self.topology.bytes_per_s[level] * self.reached[level].value

    @property
    def with_least_overhead(self) -> "Hardware | None":
        """This card with the least overhead of a layer that a published run implies; None: none is far below."""
        least = self.layer_s.least
        return None if least is None else replace(self, layer_s=replace(self.layer_s, value=least))

    @property
    def usable_bytes(self) -> float:
        """HBM of a die that tensors may take."""
        return self.hbm_bytes.value - self.reserved_bytes.value

    @property
    def levels(self) -> tuple[int, ...]:
        """Indices in `LEVELS` of the links that such a machine has: without cards of several dies there is no link
        inside a card, without supernodes none inside a supernode."""
        topology = self.topology
        exists = (
            topology.ranks_per_card > 1,
            topology.ranks_per_node > topology.ranks_per_card,
            self.has_supernodes,
            True,
        )
        return tuple(level for level, present in enumerate(exists) if present)

    @property
    def has_supernodes(self) -> bool:
        """Return whether several nodes share links that are faster than the network."""
        return self.topology.ranks_per_supernode > self.topology.ranks_per_node

    def figures(self) -> dict[str, tuple[float, str]]:
        """Return every constant by name, with its source, for a report."""
        shown: dict[str, tuple[float, str]] = {}
        for level in self.levels:
            peak, share = self.topology.bytes_per_s[level] / 1e9, self.reached[level]
            shown[f"{LEVELS[level]} link"] = (
                self.link_bytes_per_s(level),
                f"{peak:.0f} GB/s x {share.value:.2f}; {share}",
            )
        rest = {f.name: getattr(self, f.name) for f in fields(self)}
        return shown | {name: (f.value, str(f)) for name, f in rest.items() if isinstance(f, Figure)}


FOLDER = Path(__file__).resolve().parent

UNITS = {
    "s": {"s": Fraction(1), "us": Fraction(1, 10**6)},
    "bytes": {"GiB": Fraction(2**30), "GB": Fraction(10**9), "TB": Fraction(10**12)},
    "bytes_per_s": {"GB/s": Fraction(10**9), "GiB/s": Fraction(2**30), "TB/s": Fraction(10**12)},
    "flops": {"TFLOP/s": Fraction(10**12)},
    "reached": {"share": Fraction(1)},
}
"""Dimension, as the last words of a constant's name → unit → its size in bytes, seconds, operations/s."""
TABLES = tuple(name for name in OPERATORS if name != "auto")

CONSTANTS = tuple(f.name for f in fields(Hardware) if f.name not in ("name", "operators", "topology", "reached"))


def hardware_names() -> tuple[str, ...]:
    """Return the cards that `cluster.hardware` may name."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


@cache
def hardware_named(name: str) -> Hardware:
    """Load the constants of a card by name. Raise ValueError: no card of this name."""
    if name not in hardware_names():
        raise ValueError(f"cluster.hardware={name!r}: expected one of {', '.join(hardware_names())}")
    return load_hardware(FOLDER / f"{name}.yaml")


def load_hardware(path: Path) -> Hardware:
    """Load and check one card's file.
    Raise ValueError: a key that is unknown or missing, a value that is no finite number > 0, an unknown unit or a
    missing source; names the file and the key."""
    card = _Section(path.name, "", _values(path))
    card.expect("description", "operators", "topology", "links", "constants")
    card.text("description")
    if card.text("operators") not in TABLES:
        raise card.error("operators", f"expected one of {', '.join(TABLES)}, not {card.text('operators')!r}")
    constants = card.section("constants")
    constants.expect(*CONSTANTS)
    topology, reached = _topology(card.section("topology"), card.section("links"))
    return Hardware(
        name=path.stem,
        operators=card.text("operators"),
        topology=topology,
        reached=reached,
        **{name: constants.figure(name) for name in CONSTANTS},
    )


def _values(path: Path) -> Any:
    """Return what a file states, and below that what the card states that it is ``like``."""
    stated = yaml.safe_load(path.read_text())
    other = stated.pop("like", None) if isinstance(stated, dict) else None
    if other is None:
        return stated
    if other not in hardware_names():
        raise ValueError(f"{path.name}: like: expected one of {', '.join(hardware_names())}, not {other!r}")
    sections = _values(FOLDER / f"{other}.yaml")
    for name, values in stated.items():
        known = sections.get(name)
        sections[name] = known | values if isinstance(known, dict) and isinstance(values, dict) else values
    return sections


def _topology(shape: "_Section", links: "_Section") -> tuple[Topology, tuple[Figure, ...]]:
    """Return the machine's levels, and the share of each level's bandwidth that is reached."""
    shape.expect("dies_per_card", "dies_per_node", "dies_per_supernode", "host_bytes_per_s", "source")
    card, node = shape.count("dies_per_card"), shape.count("dies_per_node")
    supernode = node if shape.values["dies_per_supernode"] is None else shape.count("dies_per_supernode")
    if node % card or supernode % node:
        raise shape.error("dies_per_node", f"expected {card} to divide {node}, and {node} to divide {supernode}")
    present = {"card": card > 1, "node": True, "supernode": supernode > node, "network": True}
    links.expect(*(level for level in LEVELS if present[level]))
    peaks, shares = [], []
    for level in LEVELS:
        link = links.section(level if present[level] else "node")
        link.expect("peak_bytes_per_s", "reached")
        peaks.append(link.figure("peak_bytes_per_s").value)
        shares.append(link.figure("reached"))
    topology = Topology(
        ranks_per_card=card,
        ranks_per_node=node,
        ranks_per_supernode=supernode,
        bytes_per_s=tuple(peaks),
        source=shape.text("source"),
        host_bytes_per_s=shape.figure("host_bytes_per_s").value,
    )
    return topology, tuple(shares)


class _Section:
    """A mapping of a file, and where it is: ``key`` is the path of keys to it, for messages."""

    def __init__(self, file: str, key: str, values: Any):
        self.file, self.key = file, key
        if not isinstance(values, Mapping):
            raise ValueError(f"{file}: {key or 'the file'}: expected a mapping, not {values!r}")
        self.values = values

    def error(self, key: str, what: str) -> ValueError:
        return ValueError(f"{self.file}: {'.'.join(filter(None, (self.key, key)))}: {what}")

    def expect(self, *keys: str, optional: tuple[str, ...] = ()) -> None:
        for key in self.values:
            if key not in (*keys, *optional):
                raise self.error(str(key), f"unknown key; expected {', '.join((*keys, *optional))}")
        for key in keys:
            if key not in self.values:
                raise self.error(key, "missing")

    def section(self, key: str) -> "_Section":
        return _Section(self.file, ".".join(filter(None, (self.key, key))), self.values[key])

    def text(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str) or not value.strip():
            raise self.error(key, f"expected a text, not {value!r}")
        return " ".join(value.split())

    def count(self, key: str) -> int:
        value = self.values[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, f"expected a whole number of at least 1, not {value!r}")
        return value

    def figure(self, key: str) -> Figure:
        """Return a constant of ``value``, ``unit``, ``source``, if that was not published, ``assumed: true``, and of a
        layer's overhead, where a published run implies far less, ``least``."""
        constant = self.section(key)
        constant.expect("value", "unit", "source", optional=("assumed", "least") if key == "layer_s" else ("assumed",))
        # The longest suffix, as `hbm_bytes_per_s` also ends in `_s`.
        dimension = max((name for name in UNITS if key.endswith(name)), key=len)
        value, unit, assumed = (constant.values.get(name) for name in ("value", "unit", "assumed"))
        if unit not in UNITS[dimension]:
            raise constant.error("unit", f"expected one of {', '.join(UNITS[dimension])}, not {unit!r}")
        if not _is_positive(value):
            raise constant.error("value", f"expected a finite number > 0, not {value!r}")
        if dimension == "reached" and value > 1:
            raise constant.error("value", f"expected a share of at most 1, not {value!r}")
        if assumed not in (None, True, False):
            raise constant.error("assumed", f"expected true or false, not {assumed!r}")
        least = constant.values.get("least", value / 2)
        if not _is_positive(least) or least >= value:
            raise constant.error("least", f"expected a number > 0 and < {value}, not {least!r}")
        # Rounded once: 152 us is the float 152e-6.
        size, smallest = (float(Fraction(number) * UNITS[dimension][unit]) for number in (value, least))
        return Figure(size, constant.text("source"), bool(assumed), smallest if "least" in constant.values else None)


def _is_positive(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0
