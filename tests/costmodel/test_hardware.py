"""Figures of machines are stated once, with where they come from, for the run and for the plan alike."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fusion.costmodel.hardware import Figure, hardware_named, hardware_names, load_hardware
from fusion.costmodel.hardware.load import FOLDER
from fusion.ep_switch.topology import LEVELS, Topology
from stalesync.job.config import ClusterConfig

CLUSTERS = Path(__file__).resolve().parents[2] / "recipes" / "conf" / "cluster"
ASCEND_910C = hardware_named("ascend_910c")


def test_the_cards_that_a_cluster_may_name():
    assert hardware_names() == ("ascend_910b", "ascend_910c", "h100", "h800")
    for name in hardware_names():
        ClusterConfig(hardware=name).validate()


@pytest.mark.parametrize("name", hardware_names())
def test_every_figure_has_a_source(name):
    hardware = hardware_named(name)
    assert hardware.topology.source and hardware.usable_bytes > 2**30
    for figure, (value, source) in hardware.figures().items():
        assert value > 0 and len(source) > 10, figure


def test_what_is_assumed_says_so():
    assert str(hardware_named("h100").layer_s).startswith("assumed: ")
    assert hardware_named("h100").flops.assumed is False


def test_a_card_may_state_how_little_overhead_a_published_run_implies():
    least = ASCEND_910C.with_least_overhead
    assert least.layer_s.value == ASCEND_910C.layer_s.least < ASCEND_910C.layer_s.value
    assert replace(least, layer_s=ASCEND_910C.layer_s) == ASCEND_910C
    assert hardware_named("h100").with_least_overhead is None


def test_the_910cs_topology_is_the_published_one_of_the_cloudmatrix384():
    ub = 392e9 / 2
    assert ASCEND_910C.topology == Topology(
        ranks_per_card=2,
        ranks_per_node=16,
        ranks_per_supernode=768,
        bytes_per_s=(ub, ub, 0.97 * ub, 400e9 / 8 / 2),
        source="CloudMatrix384 as published: UB 392 GB/s and RDMA 400 Gb/s a package, UB across nodes -3 %",
        host_bytes_per_s=4 * 160e9 / 16,
    )
    assert [LEVELS[level] for level in ASCEND_910C.levels] == list(LEVELS)


def test_the_910c_has_one_fast_class_within_a_supernode():
    topology = ASCEND_910C.topology
    assert topology.classes == ((0, 1, 2), (3,))
    assert topology.group(767, 0) == 0 and topology.group(768, 0) == 1
    assert topology.bytes_per_s[3] < topology.bytes_per_s[2] < topology.bytes_per_s[1]


@pytest.mark.parametrize("name", ["ascend_910b", "h100", "h800"])
def test_levels_that_a_machine_lacks_relate_no_two_dies(name):
    hardware = hardware_named(name)
    assert [LEVELS[level] for level in hardware.levels] == ["node", "network"]
    pairs = [(one, other) for one in range(24) for other in range(24) if one != other]
    assert {LEVELS[hardware.topology.level(*pair)] for pair in pairs} == {"node", "network"}
    assert len(hardware.topology.classes) == 2, "the network is slower, all else is one class"


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
    message = "cluster.hardware='abacus': expected one of ascend_910b, ascend_910c, h100, h800"
    with pytest.raises(ValueError, match=message):
        hardware_named("abacus")
    with pytest.raises(ValueError, match=message):
        ClusterConfig(hardware="abacus").validate()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("constants.flops", None, "card.yaml: constants.flops: missing"),
        ("constants.watts", 700, "card.yaml: constants.watts: unknown key; expected collective_s"),
        ("colour", "green", "card.yaml: colour: unknown key"),
        ("links", None, "card.yaml: links: missing"),
        ("constants.flops.value", "fast", "constants.flops.value: expected a finite number > 0, not 'fast'"),
        ("constants.flops.value", True, "constants.flops.value: expected a finite number > 0, not True"),
        ("constants.flops.value", float("nan"), "constants.flops.value: expected a finite number > 0, not nan"),
        ("constants.flops.value", float("inf"), "constants.flops.value: expected a finite number > 0, not inf"),
        ("constants.flops.value", 0, "constants.flops.value: expected a finite number > 0, not 0"),
        ("constants.flops.value", None, "constants.flops.value: missing"),
        ("constants.flops.source", None, "constants.flops.source: missing"),
        ("constants.flops.source", " ", "constants.flops.source: expected a text"),
        ("constants.flops.unit", "GB/s", "constants.flops.unit: expected one of TFLOP/s, not 'GB/s'"),
        ("constants.hbm_bytes_per_s.unit", "us", "constants.hbm_bytes_per_s.unit: expected one of GB/s"),
        ("constants.flops.assumed", "maybe", "constants.flops.assumed: expected true or false"),
        ("constants.layer_s.least", 100, "constants.layer_s.least: expected a number > 0 and < 100, not 100"),
        ("constants.layer_s.least", "few", "constants.layer_s.least: expected a number > 0 and < 100, not 'few'"),
        ("constants.flops.least", 1, "card.yaml: constants.flops.least: unknown key"),
        ("constants.train_reached.value", 1.5, "train_reached.value: expected a share of at most 1, not 1.5"),
        ("constants.flops", 989, "constants.flops: expected a mapping, not 989"),
        ("operators", "auto", "operators: expected one of plain, cpu, ascend, cuda, cuda_fused, not 'auto'"),
        ("topology.dies_per_node", 0, "topology.dies_per_node: expected a whole number of at least 1, not 0"),
        ("topology.dies_per_supernode", 12, "topology.dies_per_node: expected 1 to divide 8, and 8 to divide 12"),
        ("topology.source", None, "topology.source: missing"),
        ("links.supernode", {"peak_bytes_per_s": 1}, "links.supernode: unknown key; expected node, network"),
        ("links.node", None, "links.node: missing"),
        ("links.network.reached", None, "links.network.reached: missing"),
        ("like", "abacus", "card.yaml: like: expected one of ascend_910b, ascend_910c, h100, h800, not 'abacus'"),
    ],
)
def test_a_wrong_file_is_refused_by_file_and_key(path, value, message, tmp_path):
    """``value`` at the key ``path`` of the H100's file; None: the key is left out."""
    card = yaml.safe_load((FOLDER / "h100.yaml").read_text())
    *outer, last = path.split(".")
    section = card
    for key in outer:
        section = section[key]
    section.pop(last, None)
    if value is not None:
        section[last] = value
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(card))
    with pytest.raises(ValueError) as refused:
        load_hardware(tmp_path / "card.yaml")
    assert message in str(refused.value)


def test_a_card_like_another_has_what_its_own_file_does_not_state(tmp_path):
    own = {"description": "a faster H100", "like": "h100", "constants": {"flops": {"value": 2, "unit": "TFLOP/s"}}}
    own["constants"]["flops"]["source"] = "a test"
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(own))
    h100, card = hardware_named("h100"), load_hardware(tmp_path / "card.yaml")
    assert card == replace(h100, name="card", flops=Figure(2e12, "a test"))
    own["constants"]["flops"].pop("source")
    (tmp_path / "card.yaml").write_text(yaml.safe_dump(own))
    with pytest.raises(ValueError, match="card.yaml: constants.flops.source: missing"):
        load_hardware(tmp_path / "card.yaml")


def test_every_file_is_installed():
    """The distribution ships each card's file."""
    assert '"fusion.costmodel.hardware": ["*.yaml"]' in (CLUSTERS.parents[2] / "setup.py").read_text()
