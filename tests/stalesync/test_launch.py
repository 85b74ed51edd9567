"""A Ray that cannot be started or joined is reported with what to do about it."""

import pytest
import ray

from stalesync.failures import RayNotStarted
from stalesync.launch import _ray


def test_a_ray_that_does_not_start_in_time_says_what_to_do(monkeypatch):
    ray.shutdown()  # that of other tests
    monkeypatch.setenv("RAY_gcs_server_port_wait_time_s", "0")
    with (
        pytest.raises(RayNotStarted, match="machine is busy.* RAY_raylet_start_wait_time_s=300 .* Timed out"),
        _ray(None),
    ):
        raise AssertionError("it has started")
    assert not ray.is_initialized()


def test_a_cluster_that_cannot_be_joined_is_named_with_its_key():
    told = str(RayNotStarted("host:6379", ConnectionError("refused")))
    assert told.startswith("cluster.address=host:6379: could not join") and told.endswith("ConnectionError: refused")
