"""Load a card's YAML file, strictly: every constant is there, is a finite number > 0 in a known unit, has a source.

    operators:  the card's table of `fusion/npu/operators`
    topology:   dies_per_card, dies_per_node, dies_per_supernode (null: no supernodes), host link, source
    links:      card, node, supernode, network: peak bandwidth one way of one die, and the share of it that is reached
    constants:  the other fields of `Hardware`

A level of `links` that the machine does not have is left out of its file, and has to be: its entry in the Topology
repeats that of the node, so that plans see one class of links where there is one."""

from collections.abc import Mapping
from dataclasses import fields
from fractions import Fraction
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from fusion.costmodel.hardware.card import Figure, Hardware
from fusion.ep_switch.topology import LEVELS, Topology
from fusion.npu.config import OPERATORS

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
    """Load the constants of a card by name.
    Raise ValueError: no card of this name."""
    if name not in hardware_names():
        raise ValueError(f"cluster.hardware={name!r}: expected one of {', '.join(hardware_names())}")
    return load_hardware(FOLDER / f"{name}.yaml")


def load_hardware(path: Path) -> Hardware:
    """Load and check one card's file.
    Raise ValueError: a key that is unknown or missing, a value that is no finite number > 0, an unknown unit or a
    missing source; names the file and the key."""
    card = _Section(path.name, "", yaml.safe_load(path.read_text()))
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
        """Return a constant of ``value``, ``unit``, ``source`` and, if that was not published, ``assumed: true``."""
        constant = self.section(key)
        constant.expect("value", "unit", "source", optional=("assumed",))
        # The longest suffix, as `hbm_bytes_per_s` also ends in `_s`.
        dimension = max((name for name in UNITS if key.endswith(name)), key=len)
        value, unit, assumed = (constant.values.get(name) for name in ("value", "unit", "assumed"))
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value) or value <= 0:
            raise constant.error("value", f"expected a finite number > 0, not {value!r}")
        if unit not in UNITS[dimension]:
            raise constant.error("unit", f"expected one of {', '.join(UNITS[dimension])}, not {unit!r}")
        if dimension == "reached" and value > 1:
            raise constant.error("value", f"expected a share of at most 1, not {value!r}")
        if assumed not in (None, True, False):
            raise constant.error("assumed", f"expected true or false, not {assumed!r}")
        # Rounded once: 152 us is the float 152e-6.
        size = float(Fraction(value) * UNITS[dimension][unit])
        return Figure(size, constant.text("source"), assumed=bool(assumed))
