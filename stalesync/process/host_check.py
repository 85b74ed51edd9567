"""Refuse, before anything of a run is started, a cluster whose hosts cannot train together.

Every live host of the cluster is asked, also one without a card of the run: it stores samples of the queue."""

import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from stalesync.process.failures import RunFailed, first_line
from stalesync.process.host_files import HostReport, find_differences, report_files
from stalesync.process.hosts import Host, alive_hosts, describe_hosts
from stalesync.process.ray_folder import EXPOSED

log = logging.getLogger(__name__)


class HostsDiffer(RunFailed):
    """The hosts of the cluster do not reach each other, or do not have the same files; the message names them."""

    def __init__(self, differences: list[str]):
        super().__init__("\n".join([*differences, 'docs/stalesync.md, "Several hosts", lists what hosts must share']))


def check_hosts(folder: Path, models: Mapping[str, str | None], timeout_s: float) -> None:
    """Check the hosts of the Ray cluster that this process has joined; does nothing where there is only one. Warns of
    those whose Ray other users can change. ``folder``: the run's; it exists; ``models``: paths of the models by config
    key; None: there is none; ``timeout_s``: for all hosts to answer. Raise HostsDiffer if a host's address, its files
    or its access to the run's folder are wrong, or it does not answer."""
    hosts = alive_hosts(ray.nodes())
    if len(hosts) < 2:
        return
    if hidden := [host for host in hosts.values() if host.is_loopback]:
        raise HostsDiffer(
            [
                f"cluster.address: {describe_hosts(hidden)} can be reached by no other host: its name is mapped to a "
                "loopback address (/etc/hosts), and no route led Ray to another one. Start its Ray again with "
                "--node-ip-address=ADDRESS"
            ]
        )
    folders = {f"{key}={path}": path for key, path in models.items() if path is not None}
    mark = folder.resolve() / f".hosts-{secrets.token_hex(8)}"
    mark.touch(mode=0o600)
    try:
        reports = _ask(hosts, str(mark), folders, timeout_s)
        differences = find_differences(str(folder.resolve()), report_files(str(mark), folders), reports)
    finally:
        for path in mark.parent.glob(f"{mark.name}*"):
            path.unlink(missing_ok=True)
    if differences:
        raise HostsDiffer(differences)
    own = hosts.get(ray.get_runtime_context().get_node_id())  # of which `ray_cluster` has warned
    for host, report in reports.items():
        if report.exposed and host != own:
            log.warning(EXPOSED, host, report.exposed)


def _report(mark: str, folders: Mapping[str, str]) -> HostReport:
    node: Any = ray._private.worker.global_worker.node
    return report_files(mark, folders, node.get_session_dir_path())


def _ask(hosts: Mapping[str, Host], mark: str, folders: Mapping[str, str], timeout_s: float) -> dict[Host, HostReport]:
    remote: Any = ray.remote
    ask = remote(num_cpus=0, max_retries=0)(_report)
    host_by_ref = {
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(mark, folders): host
        for node, host in hosts.items()
    }
    done, late = ray.wait(list(host_by_ref), num_returns=len(host_by_ref), timeout=timeout_s)
    problems, reports = [], dict[Host, HostReport]()
    for ref in done:
        try:
            reports[host_by_ref[ref]] = ray.get(ref)
        except Exception as error:  # of any type: what its interpreter raises, or what Ray does
            cause = getattr(error, "cause", None) or error
            reason = first_line(f"{type(cause).__name__}: {cause}")
            problems.append(f"{host_by_ref[ref]}: could not compare its files: {reason}")
    if late:
        names = describe_hosts(host_by_ref[ref] for ref in late)
        problems.append(f"{names}: no answer in {timeout_s:.0f} s (cluster.stage_timeout_s)")
    if problems:
        raise HostsDiffer(problems)
    return reports
