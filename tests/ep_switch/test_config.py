from __future__ import annotations

import pytest

from fusion.ep_switch import FusionConfig


def test_defaults_are_valid():
    FusionConfig().validate()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(deployment="hybrid"), r"fusion.deployment='hybrid': expected one of colocated"),
        (dict(bucket_bytes=10), r"fusion.bucket_bytes=10: expected a whole number of bytes of at least 1024"),
        (dict(bucket_bytes="64M"), r"fusion.bucket_bytes='64M'"),
        (dict(offload="yes"), r"fusion.offload='yes': expected true or false"),
        (dict(checksum=1), r"fusion.checksum=1: expected true or false"),
    ],
)
def test_mistakes_name_their_key(change, message):
    with pytest.raises(ValueError, match=message):
        FusionConfig(**change).validate()
