"""Define the constants of an accelerator node as plain data."""

from dataclasses import dataclass, fields

from fusion.ep_switch.topology import LEVELS, Topology


@dataclass(frozen=True)
class Figure:
    """A constant and its source; ``assumed``: no published value was found, the source explains the assumption."""

    value: float
    source: str
    assumed: bool = False

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
