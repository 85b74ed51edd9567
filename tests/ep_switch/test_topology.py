from __future__ import annotations

import pytest

from fusion.ep_switch import Topology
from fusion.ep_switch.topology import LEVELS
from tests.ep_switch.oracle import speed_class


def test_levels_are_those_of_the_innermost_group():
    topology = Topology(2, 4, 8, (9.0, 8.0, 7.0, 6.0))
    assert [LEVELS[topology.level(0, other)] for other in (1, 2, 5, 8)] == ["card", "node", "supernode", "network"]
    assert topology.level(5, 0) == topology.level(0, 5)


@pytest.mark.parametrize(
    ("speeds", "classes"),
    [
        ((100.0, 100.0, 100.0, 100.0), ((0, 1, 2, 3),)),
        ((100.0, 95.0, 91.0, 10.0), ((0, 1, 2), (3,))),
        ((100.0, 89.0, 88.0, 10.0), ((0,), (1, 2), (3,))),
        ((100.0, 95.0, 88.0, 81.0), ((0, 1), (2, 3))),
    ],
)
def test_levels_within_a_tenth_are_one_class(speeds, classes):
    topology = Topology(1, 2, 4, speeds)
    assert topology.classes == classes
    for one, other in ((0, 1), (0, 2), (0, 5)):
        speed = speed_class(topology, one, other)
        assert topology.level(one, other) in classes[speed]
        assert topology.group(one, speed) == topology.group(other, speed)
        assert speed == 0 or topology.group(one, speed - 1) != topology.group(other, speed - 1)


def test_groups_fit_into_each_other():
    with pytest.raises(AssertionError):
        Topology(2, 3, 6)
