"""What a cluster is made of: figures of the machines, each with where it comes from.

A cluster is a number of dies (`cluster.npus`) of a kind of hardware (`cluster.hardware`, a name in HARDWARE). The
switch asks it for the topology, the estimates (`fusion.costmodel`) for everything else. What is measured is
preferred to what is promised; what is assumed is called so.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from fusion.ep_switch.topology import LEVELS, Topology

HIXL = "measured on Atlas A3 (CANN HIXL benchmark, 8 MB)"
A3_RUN = "DeepSeek-R1 RL on 128 Atlas A3 cards, cann-recipes-train"
PAPER = "arXiv 2506.12708"


@dataclass(frozen=True)
class Figure:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One kind of accelerator node. Bytes, bytes/s, seconds; a die is what one worker has."""

    name: str
    topology: Topology
    reached: tuple[Figure, Figure, Figure, Figure]
    """Share of a link's bandwidth that a large transfer reaches, by level of the topology."""
    collective_s: Figure
    """Seconds that one exchange between all dies takes however little it moves."""
    hbm_bytes: Figure
    """Of one die."""
    reserved_bytes: Figure
    """Of that, what the runtime holds before the first tensor."""
    hbm_bytes_per_s: Figure
    """What a copy reads and writes together."""
    flops: Figure
    """bf16, of one die."""
    forward_reached: Figure
    """Of that, what a forward pass reaches that is bound by arithmetic."""
    train_reached: Figure
    """The same of a training step, transfers and the pipeline's bubble not counted."""
    layer_s: Figure
    """What a layer of an engine's step takes beside its reads, its arithmetic and its exchanges: launches, the host."""
    out_bytes_per_s: Figure
    """From a die to pinned host memory, while all dies of the node copy."""
    back_bytes_per_s: Figure
    host_bytes: Figure
    """Host memory of one node."""
    host_copy_bytes_per_s: Figure
    """One core copying between two places of host memory: what an unpinned copy waits for."""
    unmap_bytes_per_s: Figure
    """HBM given back by the caching allocator (`empty_cache`)."""

    def link_bytes_per_s(self, level: int) -> float:
        """What one die reaches over a link of a level of the topology."""
        return self.topology.bytes_per_s[level] * self.reached[level].value

    @property
    def usable_bytes(self) -> float:
        return self.hbm_bytes.value - self.reserved_bytes.value

    def figures(self) -> dict[str, tuple[float, str]]:
        """Every figure and its source, to be printed beside what was computed from it."""
        found: dict[str, tuple[float, str]] = {}
        for i, level in enumerate(LEVELS):
            peak, share = self.topology.bytes_per_s[i] / 1e9, self.reached[i]
            found[f"{level} link"] = self.link_bytes_per_s(i), f"{peak:.0f} GB/s x {share.value:.2f}; {share.source}"
        rest = {f.name: getattr(self, f.name) for f in fields(self)}
        return found | {name: (f.value, f.source) for name, f in rest.items() if isinstance(f, Figure)}


_UB = 0.63

ASCEND_910C = Hardware(
    name="ascend_910c",
    topology=Topology.cloudmatrix384(),
    reached=(
        Figure(_UB, "assumed to reach what UB does"),
        Figure(_UB, f"UB writes in a node reach 123.5 of 196; {HIXL}"),
        Figure(_UB, f"UB writes across nodes reach 119.7 of 190; {HIXL}"),
        Figure(0.90, f"RDMA writes reach 22.7 of 25; {HIXL}"),
    ),
    collective_s=Figure(152e-6, f"expert dispatch over 256 dies, {PAPER}, table of CANN EP"),
    hbm_bytes=Figure(64 * 2.0**30, f"128 GB a package of two dies, {PAPER}, section 3.3"),
    reserved_bytes=Figure(4 * 2.0**30, "assumed: CANN context, HCCL buffers of the groups, fragments"),
    hbm_bytes_per_s=Figure(0.84 * 1.6e12, f"3.2 TB/s a package, of which kernels reach 84 %, {PAPER}"),
    flops=Figure(376e12, f"752 TFLOPS a package, {PAPER}, section 3.3"),
    forward_reached=Figure(0.33, f"prefill of 6,688 tokens/s a package x 2 x 37B of 1,504 INT8 TOPS, {PAPER}"),
    train_reached=Figure(0.195, f"calibrated: an update took 319.3 s; {A3_RUN}"),
    layer_s=Figure(0.078 / 61, f"calibrated: a rollout took 373.65 s, 78 ms a step of 61 layers more; {A3_RUN}"),
    out_bytes_per_s=Figure(30e9, f"{HIXL}; a node's 4 Kunpeng at 160 GB/s allow 40 a die, {PAPER}"),
    back_bytes_per_s=Figure(34e9, f"{HIXL}; a node's 4 Kunpeng at 160 GB/s allow 40 a die, {PAPER}"),
    host_bytes=Figure(1.5e12, "the lesser of the published node configurations, 1.5 to 2.9 TB"),
    host_copy_bytes_per_s=Figure(10e9, "assumed: one Kunpeng core; the check on the A3 run holds from 7 to 40 GB/s"),
    unmap_bytes_per_s=Figure(26 * 2.0**30 / 4, f"26 GB given back in 4 s, {A3_RUN}"),
)

HARDWARE = {hardware.name: hardware for hardware in (ASCEND_910C,)}


def hardware_named(name: str) -> Hardware:
    """Raises:
    ValueError: no hardware of this name.
    """
    if name not in HARDWARE:
        raise ValueError(f"cluster.hardware={name!r}: expected one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
