from __future__ import annotations

import pytest

from fusion.ep_switch import FusionConfig


def test_defaults_are_valid():
    FusionConfig().validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(deployment="apart"), r"fusion.deployment='apart': expected one of separate, colocated, full, hybrid"),
        (dict(infer_cards=0), r"fusion.infer_cards=0: expected a whole number of at least 1, or null"),
        (dict(score_cards=-1), r"fusion.score_cards=-1: expected a whole number of at least 0"),
        (dict(resident="some"), r"fusion.resident='some': expected one of auto, one, all"),
        (dict(bucket_bytes=10), r"fusion.bucket_bytes=10: expected a whole number of at least 1024"),
        (dict(bucket_bytes="64M"), r"fusion.bucket_bytes='64M'"),
        (dict(offload="yes"), r"fusion.offload='yes': expected one of none, switch, stream"),
        (dict(offload=True), r"fusion.offload=True: expected one of none, switch, stream"),
        (dict(checksum=1), r"fusion.checksum=1: expected true or false"),
    ],
)
def test_mistakes_name_their_key(change, message):
    with pytest.raises(ValueError, match=message):
        FusionConfig(**change).validate()
