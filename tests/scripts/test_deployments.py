"""recipes/kuberay.yaml and recipes/docker: what they name exists, versions are pinned and agree."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fusion.resources import RECIPES
from stalesync.console import scripts_by_command
from stalesync.overrides import check_overrides

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((RECIPES / "docker").glob("*.Dockerfile"))

JOB_FIELDS = {
    *("entrypoint", "submissionMode", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"),
    *("activeDeadlineSeconds", "rayClusterSpec", "runtimeEnvYAML", "suspend", "submitterPodTemplate"),
}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
WORKER_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
"""Of KubeRay's API reference, ray.io/v1 (https://ray-project.github.io/kuberay/reference/api)"""


@pytest.fixture(scope="module")
def job():
    return yaml.safe_load((RECIPES / "kuberay.yaml").read_text())


def groups_of(job):
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_the_job_has_the_fields_that_kuberay_documents(job):
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"].keys() <= JOB_FIELDS and job["spec"]["submissionMode"] == "K8sJobMode"
    assert cluster.keys() == CLUSTER_FIELDS and cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"].keys() == {"rayStartParams", "template"}
    for group in groups_of(job):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() == WORKER_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_pods_mount_what_they_declare_and_have_room_for_rays_objects(job):
    for group in groups_of(job):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert mounts.keys() == {"/shared", "/dev/shm"} and {*mounts.values()} == volumes.keys()
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            assert container["resources"]["limits"] == container["resources"]["requests"]


def test_the_entrypoint_is_a_command_with_keys_that_exist(job):
    program, command, *overrides = shlex.split(job["spec"]["entrypoint"])
    assert program == "rlfusion" and command in scripts_by_command(ROOT / "scripts")
    folders = [folder for folder in (RECIPES / "conf").iterdir() if folder.is_dir()]
    check_overrides(overrides, {folder.name: sorted(f.stem for f in folder.glob("*.yaml")) for folder in folders})
    values = dict(override.split("=", 1) for override in overrides)
    assert values["cluster.address"] == "auto" and values["run.resume"] == "true"
    assert values["run.dir"].startswith("/shared/") and values["model.path"].startswith("/shared/")


def test_versions_are_pinned_and_agree(job):
    assert [path.name for path in DOCKERFILES] == ["ascend.Dockerfile", "cpu.Dockerfile"]
    version = re.search(r'version="([\d.]+)"', (ROOT / "setup.py").read_text())[1]
    for path in DOCKERFILES:
        text = path.read_text()
        assert re.search(r"^FROM \S+:\S*\d+\.\d+\.\d+\S*$", text, re.MULTILINE), "a base image by its version"
        assert re.findall(r"ray\[default\]==([\d.]+)", text) == [job["spec"]["rayClusterSpec"]["rayVersion"]]
        assert f"-t rlfusion:{version}-{path.name.partition('.')[0]} " in text
        sources = re.findall(r"^COPY (\S+) ", text, re.MULTILINE)
        assert sources and all((ROOT / source).exists() for source in sources)
    images = {container["image"] for group in groups_of(job) for container in group["template"]["spec"]["containers"]}
    assert images == {f"rlfusion:{version}-cpu"}
