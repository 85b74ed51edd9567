"""Hosts are named in messages, and compared before a run begins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import ray

from fusion.npu.failures import FailureKind, RankFailure
from stalesync.cards.stage_calls import RunningStage, describe_hanging, gather_failures
from stalesync.policy.placing import spread
from stalesync.process import host_check
from stalesync.process.failures import HOST_ENDED, OUT_OF_REACH, FailedStage, TokenRefused
from stalesync.process.host_check import HostsDiffer, check_hosts
from stalesync.process.host_files import (
    CODE,
    HostReport,
    code_digests,
    digest_of,
    digests_of,
    find_differences,
    report_files,
)
from stalesync.process.hosts import Host, alive_hosts, all_hosts, describe_ranks

A, B = Host("1", "host-a", "10.0.0.1"), Host("2", "host-b", "10.0.0.2")
NODES = [
    dict(NodeID="1", NodeManagerHostname="host-a", NodeManagerAddress="10.0.0.1", Alive=True),
    dict(NodeID="2", NodeManagerHostname="host-b", NodeManagerAddress="10.0.0.2", Alive=False),
]


def test_hosts_are_those_that_ray_knows_by_their_address():
    assert all_hosts(NODES) == {"1": A, "2": B} and alive_hosts(NODES) == {"1": A}
    assert not A.is_loopback and Host("3", "debian", "127.0.1.1").is_loopback and Host("4", "six", "::1").is_loopback


@pytest.mark.parametrize(
    ("ranks", "hosts", "words"),
    [
        ([4, 1], [], "rank 1 and rank 4"),
        ([1], [A, A], "rank 1"),
        ([3], [A, A, B, B], "rank 3 on host-b (10.0.0.2)"),
        ([3, 0, 2], [A, A, B, B], "rank 0 on host-a (10.0.0.1) and rank 2 and rank 3 on host-b (10.0.0.2)"),
    ],
)
def test_ranks_are_named_with_their_hosts_where_there_are_several(ranks, hosts, words):
    assert describe_ranks(ranks, hosts) == words
    assert words in describe_hanging(ranks, hosts)


def died(rank, error=None):
    return FailedStage.of(error or ray.exceptions.RayActorError(), rank=rank, stage="train")


def test_a_card_that_died_is_named_with_its_host_and_what_is_known_of_it():
    hosts = [A, A, B, B]
    told = {
        "killed": str(died(3).error(hosts)),
        "out of reach": str(died(3, ray.exceptions.ActorUnavailableError("gone", None)).error(hosts)),
        "host lost": str(died(3).error(hosts, lost_hosts={B})),
        "of one host": str(died(3).error([A] * 4)),
    }
    assert told == {
        "killed": "rank 3 on host-b (10.0.0.2) died in stage 'train' (killed, out of host memory, or crashed)",
        "out of reach": f"rank 3 on host-b (10.0.0.2) died in stage 'train' ({OUT_OF_REACH})",
        "host lost": f"rank 3 on host-b (10.0.0.2) died in stage 'train' ({HOST_ENDED})",
        "of one host": "rank 3 died in stage 'train' (killed, out of host memory, or crashed)",
    }
    failed = FailedStage(RankFailure(0, "train", FailureKind.FAILED, "ValueError", "no"), "trace").error(hosts)
    assert str(failed) == "rank 0 on host-a (10.0.0.1) failed in stage 'train': ValueError: no\ntrace"


def test_where_only_consequences_are_reported_the_cause_is_waited_for(monkeypatch):
    """The cards of the other host notice that a connection was closed before Ray notices that the host has ended."""
    monkeypatch.setattr("stalesync.cards.stage_calls.GATHER_FAILURES_S", 0.1)
    lost = FailedStage(RankFailure(0, "train", FailureKind.PEER_LOST, "RuntimeError", "connection closed by peer"))
    answers = {"late": ray.exceptions.RayActorError(), "fine": None}
    polls = []

    def wait(refs, timeout):
        polls.append(timeout)
        return (["late"] if len(polls) > 4 else []), None

    def get(ref):
        raise answers[ref]

    monkeypatch.setattr("stalesync.cards.stage_calls.ray.wait", wait)
    monkeypatch.setattr("stalesync.cards.stage_calls.ray.get", get)
    clock = iter(range(99))
    monkeypatch.setattr("stalesync.cards.stage_calls.time.monotonic", lambda: next(clock) / 20)
    generating = RunningStage("generate", (2, 3), {"late": 2, "fine": 3})
    failed = gather_failures(lost, [RunningStage("train", (0,), {}), generating])
    assert [(one.failure.rank, one.failure.stage, one.failure.kind) for one in failed] == [
        (0, "train", FailureKind.PEER_LOST),
        (2, "generate", FailureKind.DIED),
    ]


def test_a_cause_that_is_reported_first_is_not_waited_for(monkeypatch):
    monkeypatch.setattr("stalesync.cards.stage_calls.GATHER_FAILURES_S", 0.05)
    monkeypatch.setattr("stalesync.cards.stage_calls.GATHER_CAUSE_S", 1e9)
    monkeypatch.setattr("stalesync.cards.stage_calls.ray.wait", lambda refs, timeout: ([], refs))
    assert len(gather_failures(died(1), [RunningStage("train", (0, 1), {"ref": 0})])) == 1


def test_emulated_cards_are_spread_evenly_and_neighbours_stay_together():
    assert spread(4, ["a", "b"]) == ["a", "a", "b", "b"] and spread(3, ["a", "b"]) == ["a", "a", "b"]
    assert spread(2, ["a", "b", "c"]) == ["a", "b"] and spread(2, ["a"]) == ["a", "a"]


def test_files_that_differ_are_named_with_host_and_key():
    own = HostReport(
        True, "", {"model.path=/m": {"config.json": "1:a", "model.safetensors": "9:b"}, CODE: {"x.py": "1"}}
    )
    same = HostReport(True, "", dict(own.files))
    apart = HostReport(False, "", {"model.path=/m": None, CODE: {"x.py": "2"}})
    other = HostReport(
        True, "Read-only file system (user 7)", dict(own.files) | {"model.path=/m": {"config.json": "1:a"}}
    )
    assert find_differences("/runs/r", own, {A: own, B: same}) == []
    lines = find_differences("/runs/r", own, {A: own, B: apart})
    assert [line.split(":")[0] for line in lines] == ["run.dir", "model.path=/m", CODE]
    assert all("host-b (10.0.0.2)" in line and "host-a" not in line for line in lines)
    assert "is not the folder that the controller has" in lines[0] and "does not have this folder" in lines[1]
    assert lines[2].endswith("its files are not the controller's: x.py")
    lines = find_differences("/runs/r", own, {A: own, B: other})
    assert lines == [
        "run.dir: host-b (10.0.0.2) cannot write to /runs/r: Read-only file system (user 7)",
        "model.path=/m: host-b (10.0.0.2): its folder has other contents than the controller's: model.safetensors",
    ]


def test_a_host_reports_whether_it_sees_the_mark_and_what_its_folders_hold(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    folders = {"model.path=m": str(tmp_path / "model"), "reward.model=r": str(tmp_path / "nowhere")}
    (tmp_path / "mark").touch()
    report = report_files(str(tmp_path / "mark"), folders)
    assert (
        report.sees_folder
        and not report.write_error
        and sorted(path.name for path in tmp_path.iterdir())
        == [
            "mark",
            "model",
        ]
    )
    assert set(report.files["model.path=m"]) == {"config.json"} and report.files["reward.model=r"] is None
    assert report.files[CODE] == code_digests() and {"stalesync/process/hosts.py", "torch (its version)"} <= set(
        report.files[CODE]
    )
    assert not report_files(str(tmp_path / "other"), {}).sees_folder


def test_each_source_is_read_once(monkeypatch):
    paths = []
    monkeypatch.setattr("stalesync.process.host_files.digest_of", lambda path: paths.append(path) or "")
    digests = code_digests()
    assert len(set(paths)) == len(paths) == sum(not name.endswith("(its version)") for name in digests)


@pytest.mark.parametrize("size", [0, 9, 1 << 20, (3 << 20) + 1])
def test_other_contents_of_the_same_size_have_another_digest(size, tmp_path):
    for name, byte in (("one", b"a"), ("same", b"a"), ("other", b"b")):
        (tmp_path / name).write_bytes(byte * size)
    found = digests_of(tmp_path)
    assert found["one"] == found["same"] == digest_of(tmp_path / "one")
    assert (found["one"] == found["other"]) == (size == 0)


def test_a_host_whose_address_others_cannot_reach_is_refused_with_what_to_do(tmp_path, monkeypatch):
    debian = NODES[0] | dict(NodeManagerAddress="127.0.1.1")
    monkeypatch.setattr(host_check.ray, "nodes", lambda: [debian, NODES[1] | dict(Alive=True)])
    with pytest.raises(
        HostsDiffer, match=r"host-a \(127.0.1.1\) can be reached by no other host: .*--node-ip-address=A"
    ):
        check_hosts(tmp_path, {}, timeout_s=1)
    monkeypatch.setattr(host_check.ray, "nodes", lambda: [debian])
    check_hosts(tmp_path, {}, timeout_s=1)
    assert not list(tmp_path.iterdir())


def test_hosts_whose_ray_others_can_change_are_named_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("stalesync.process.host_files.exposed", lambda session: f"others may write to {session}")
    report = report_files(str(tmp_path / "mark"), {}, "/tmp/ray/session")
    assert report.exposed == "others may write to /tmp/ray/session"
    monkeypatch.setattr(host_check.ray, "nodes", lambda: [NODES[0], NODES[1] | dict(Alive=True)])
    monkeypatch.setattr(host_check.ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "1"))
    monkeypatch.setattr(host_check, "find_differences", lambda *reports: [])
    monkeypatch.setattr(host_check, "_ask", lambda *asked: {A: report, B: report})
    check_hosts(tmp_path, {}, timeout_s=1)
    (warning,) = caplog.messages
    assert f"other users of {B} can change" in warning and report.exposed in warning and "RAY_TMPDIR" in warning
    monkeypatch.setattr(host_check, "_ask", lambda *asked: {A: report, B: report_files("mark", {})})
    check_hosts(tmp_path, {}, timeout_s=1)
    assert len(caplog.messages) == 1, "of the controller's own host, joining the cluster has warned"


def test_a_token_that_is_refused_says_what_to_do():
    assert "cluster.address=auto" in str(TokenRefused("auto")) and "RAY_AUTH_MODE=token" in str(TokenRefused("auto"))
