"""Figures of machines are stated once, with where they come from, for the run and for the plan alike."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fusion.costmodel.hardware import ASCEND_910C, HARDWARE, hardware_named
from fusion.ep_switch.topology import LEVELS
from stalesync.config import ClusterConfig

CLUSTERS = Path(__file__).resolve().parents[2] / "recipes" / "conf" / "cluster"


def test_every_figure_has_a_source():
    for hardware in HARDWARE.values():
        for name, (value, source) in hardware.figures().items():
            assert value > 0 and len(source) > 10, name


def test_links_reach_a_share_of_the_topologys_bandwidth():
    reached = [ASCEND_910C.link_bytes_per_s(level) for level in range(len(LEVELS))]
    assert all(0.5 * peak < got < peak for got, peak in zip(reached, ASCEND_910C.topology.bytes_per_s, strict=True))
    assert reached[1] == pytest.approx(123.5e9, rel=0.01) and reached[2] == pytest.approx(119.7e9, rel=0.01)
    assert reached[3] == pytest.approx(22.7e9, rel=0.02)


def test_clusters_name_hardware_that_exists():
    named = [yaml.safe_load(path.read_text()) for path in CLUSTERS.glob("*.yaml")]
    assert sum("hardware" in cluster for cluster in named) >= 3
    for cluster in named:
        ClusterConfig(**cluster).validate()


def test_unknown_hardware_is_refused_by_key():
    message = "cluster.hardware='abacus': expected one of ascend_910c"
    with pytest.raises(ValueError, match=message):
        hardware_named("abacus")
    with pytest.raises(ValueError, match=message):
        ClusterConfig(hardware="abacus").validate()
