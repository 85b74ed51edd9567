"""The group `fusion`, whose keys three packages define: what is accepted, and where a key has an effect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fusion.colocate import FusionConfig
from fusion.telemetry.validation import Checks


def test_defaults_are_valid():
    FusionConfig().validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(deployment="apart"), r"fusion.deployment='apart': expected one of separate, colocated, full, hybrid"),
        (dict(infer_cards=0), r"fusion.infer_cards=0: expected a whole number of at least 1, or null"),
        (dict(score_cards=-1), r"fusion.score_cards=-1: expected a whole number of at least 0"),
        (dict(resident="some"), r"fusion.resident='some': expected one of auto, one, all"),
        (dict(bucket_bytes=10), r"fusion.bucket_bytes=10: expected a whole number in \[1024, "),
        (dict(bucket_bytes="64M"), r"fusion.bucket_bytes='64M'"),
        (dict(offload="yes"), r"fusion.offload='yes': expected one of none, switch, stream"),
        (dict(offload=True), r"fusion.offload=true: expected one of none, switch, stream"),
        (dict(checksum=1), r"fusion.checksum=1: expected true or false"),
    ],
)
def test_mistakes_name_their_key(change, message):
    with pytest.raises(ValueError, match=message):
        FusionConfig(**change).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"infer_cards": 2},
            r"fusion.infer_cards=2: expected null \(the default\) with fusion.deployment=colocated, where no card only "
            "generates; it is used with fusion.deployment=separate or hybrid",
        ),
        (
            {"deployment": "full", "score_cards": 1},
            r"fusion.score_cards=1: expected 0 \(the default\) with fusion.deployment=full, where every card scores",
        ),
        (
            {"double_buffer": True},
            "fusion.double_buffer=true: expected false .* with fusion.deployment=colocated, as no engine continues "
            "while weights arrive; it is used with fusion.deployment=separate or hybrid and stalesync.max_st",
        ),
    ],
)
def test_a_key_without_an_effect_in_a_deployment_is_refused(changes, message):
    config = FusionConfig(**changes)
    config.validate()
    with pytest.raises(ValueError, match=message):
        Checks("fusion", config).used(SimpleNamespace(fusion=config, stalesync=SimpleNamespace(max_staleness=0)))
