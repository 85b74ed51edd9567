"""The wheel and the sdist carry what a run needs; the wheel trains where there is no checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests import machine

pytestmark = pytest.mark.extended
ROOT = Path(__file__).resolve().parents[2]
CARRIED = {
    "recipes/conf": ".yaml",
    "recipes/shapes": ".yaml",
    "scripts": ".py",
    "fusion/npu/emulator": (".cpp", ".h", ".py"),
    "fusion/npu/operators": (".cpp", ".h"),
    "fusion/rollout/drafts": ".cpp",
    "fusion/costmodel/hardware": ".yaml",
    "fusion/telemetry/page/assets": (".js", ".css"),
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """`python -m build`: the sdist of the checkout, and from it the wheel, in an environment of its own."""
    folder = tmp_path_factory.mktemp("dist")
    done = machine.run([sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], 300)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def files_to_carry():
    """Those that git tracks, or would, without what builds the docs."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *CARRIED]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    wanted = {
        name
        for name in names
        for folder, ends in CARRIED.items()
        if name.startswith(f"{folder}/") and name.endswith(ends) and not name.startswith("scripts/docs/")
    }
    assert len(wanted) > 80
    return wanted


def test_wheel_and_sdist_carry_recipes_sources_and_assets(built):
    wheel, sdist = built
    in_wheel = {name.removeprefix("fusion/packaged/") for name in zipfile.ZipFile(wheel).namelist()}
    assert files_to_carry() - in_wheel == set()
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert files_to_carry() | {"recipes/quickstart.sh", "scripts/environment.sh", "LICENSE"} <= in_sdist
    assert not [name for name in in_wheel | in_sdist if name.startswith("tests/stalesync") or "__pycache__" in name]


def test_the_wheel_trains_two_steps_without_a_checkout(built, tmp_path):
    """In a new environment, which finds this one's dependencies but not its editable installation: the `.pth` files of
    a folder that is named in one are not read."""
    environment = tmp_path / "environment"
    assert machine.run([sys.executable, "-m", "venv", str(environment)], 120).returncode == 0
    bin, (packages,) = environment / "bin", environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    install = [str(bin / "python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index", str(built[0])]
    assert machine.run(install, 120, env=clean).returncode == 0

    def call(program, *arguments, timeout_s=120):
        return machine.run([str(bin / program), *arguments], timeout_s, cwd=tmp_path, env=clean)

    where = call("python", "-c", "import fusion, stalesync, sys; print(fusion.__file__, stalesync.__file__, sys.path)")
    assert where.stdout.count(str(packages / "fusion")) == 1 and str(ROOT) + "'" not in where.stdout, where.stdout
    doctor = call("rlfusion", "doctor", "--quick", "--json")
    assert doctor.returncode == 0 and json.loads(doctor.stdout)["ok"], doctor.stdout + doctor.stderr
    made = call("rlfusion", "make-base", "addition", "model", "--target", "0.02", timeout_s=240)
    assert made.returncode == 0, made.stdout + made.stderr
    small = "device=emulated data=addition data.max_prompt_length=8 data.prompts_per_step=4 algorithm.group_size=4"
    settings = [*small.split(), "rollout.max_response_length=5", "run.eval_prompts=0", "run.steps=2"]
    done = call("rlfusion", "train", "model.path=model", *settings, timeout_s=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rlfusion report runs/run OTHER_RUN" in done.stdout and "recipes/" not in done.stdout
    rows = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (tmp_path / "runs/run/report.html").is_file()
