"""The smoke recipes: on emulated cards, and on a machine that lacks what real cards need."""

import json
import os
from pathlib import Path

import pytest

from tests.machine import patience, run

ROOT = Path(__file__).resolve().parents[2]


def smoke(report, *arguments, timeout_s=120, recipe="ascend_smoke.sh"):
    """Runs the recipe; returns its exit status, report and output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ASCEND_")}
    environment["extra"] = "test"  # what `scripts/test.sh` has installed, so that a recipe does not install it anew
    command = ["bash", str(ROOT / "recipes" / recipe), "--report", str(report), *arguments]
    done = run(command, timeout_s, env=environment)
    return done.returncode, json.loads(report.read_text()) if report.exists() else None, done.stdout + done.stderr


@pytest.mark.skipif(bool(list(Path("/dev").glob("davinci[0-9]*"))), reason="this machine has an Ascend card")
def test_what_is_missing_is_refused_by_name(tmp_path):
    status, report, output = smoke(tmp_path / "r.json", "--stages", "device,hccl,switch,train")
    assert status == 1 and not report["ok"]
    for name in ("Ascend card", "CANN", "torch_npu"):
        assert name in [one["name"] for one in report["missing"]] and f"{name} is missing: " in output
    assert "environment: " in output and "HCCL_BUFFSIZE=" in output
    assert "HCCL_BUFFSIZE" in report["machine"]["started_with"]
    assert {stage["status"] for stage in report["stages"]} == {"skipped"}


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]*"))), reason="this machine has an NVIDIA card")
def test_the_recipe_of_nvidia_cards_names_the_missing_card(tmp_path):
    status, report, output = smoke(tmp_path / "r.json", "--stages", "device,train", recipe="cuda_smoke.sh")
    assert status == 1 and report["device"] == "cuda" and "NVIDIA card is missing: no /dev/nvidia0" in output
    assert {stage["status"] for stage in report["stages"]} == {"skipped"}


def test_an_unknown_stage_is_refused(tmp_path):
    status, report, output = smoke(tmp_path / "r.json", "--stages", "hcl")
    assert status == 2 and report is None and "unknown hcl; expected some of doctor, device, hccl" in output


def test_an_emulated_card_is_checked(tmp_path):
    status, report, output = smoke(tmp_path / "r.json", "--device", "emulated", "--cards", "1", "--stages", "device")
    assert status == 0 and report["ok"], output
    (device,) = (stage["figures"] for stage in report["stages"])
    assert device["cards"] == 1 and device["allocated_bytes"] == 64 << 20
    assert report["machine"]["packages"]["torch"]


@pytest.mark.extended
def test_every_stage_on_emulated_cards(tmp_path):
    timeout = str(patience(120))
    status, report, output = smoke(
        tmp_path / "r.json", "--device", "emulated", "--cards", "2", "--timeout", timeout, timeout_s=240
    )
    assert status == 0 and report["ok"], output
    assert [stage["name"] for stage in report["stages"]] == ["doctor", "device", "hccl", "switch", "model", "train"]
    _, device, hccl, switch, model, train = (stage["figures"] for stage in report["stages"])
    assert device["cards"] == 2 == hccl["cards"] and device["allocated_bytes"] == 64 << 20
    assert hccl["backend"] == "cpu:gloo,npu:hccl" and len(hccl["by_rank"]) == 2
    for direction in ("to_infer", "to_train"):
        assert 0 < switch[f"{direction}_peak_bytes"] <= switch[f"{direction}_bound_bytes"]
        assert switch[f"{direction}_bytes"] > 0
    assert model["update_diff_128"] == model["update_diff_160"] == 0 and model["engine_diff_160"] < 0.02
    assert train["steps"] == 10 and train["grad_norm_max"] > 0 and train["logprobs_diff"] < 0.02
