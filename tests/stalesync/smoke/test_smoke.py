"""The smoke test's parts: prerequisites, processes that fail, hang or crash, and what a run's metrics must show."""

from __future__ import annotations

import json
import math
import sys
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.smoke import model_checks, on_card, prerequisites
from stalesync.smoke.prerequisites import Missing, missing_for
from stalesync.smoke.processes import run_processes
from stalesync.smoke.report import FAILED, OK, SKIPPED, SmokeReport, StageResult, lines_of
from stalesync.smoke.stages import NAMES, Stages, cards_of_a_run
from stalesync.smoke.training import LOGPROB_TOLERANCE, STEPS, summarise, train_command
from tests.machine import patience, running, within

GOOD = {
    "actor/loss": 0.1,
    "actor/grad_norm": 1.0,
    "training/rollout_logprobs_diff_mean": 1e-6,
    "critic/rewards/mean": 0.2,
    "timing_s/step": 0.3,
}


def run_python(*programs, timeout_s=None, cwd="."):
    commands = [[sys.executable, "-c", program] for program in programs]
    return run_processes(commands, timeout_s=timeout_s or patience(60), cwd=cwd, variables={"SMOKE_X": "1"})


def test_each_process_answers_in_its_last_line():
    outcome = run_python("import os; print('noise'); print('{\"x\": ' + os.environ['SMOKE_X'] + '}')", "print('none')")
    assert not outcome.error and outcome.answers() == [{"x": 1}, {}]


def test_the_first_failure_is_reported_with_its_rank_and_the_others_end(tmp_path):
    wait = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    fail = (
        f"import os, time\nwhile not os.path.exists({str(tmp_path / 'pid')!r}) or not "
        f"open({str(tmp_path / 'pid')!r}).read(): time.sleep(0.01)\nprint('before')\nraise RuntimeError('no HBM')"
    )
    outcome = run_python(wait, fail)
    assert outcome.error == "rank 1: RuntimeError: no HBM"
    assert "before" in outcome.output and "Traceback" in outcome.output
    assert not running(int((tmp_path / "pid").read_text()))


def test_a_crash_and_a_hang_have_their_own_words():
    assert run_python("import os; os.kill(os.getpid(), 11)").error == "ended by SIGSEGV"
    start = time.monotonic()
    assert run_python("import time; time.sleep(600)", timeout_s=0.5).error == "did not end within 0 s"
    assert within(time.monotonic() - start, 5)


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    assert missing_for("emulated") == []
    monkeypatch.setattr(prerequisites, "card_files", lambda: [])
    monkeypatch.setattr(prerequisites, "DRIVER_VERSION", tmp_path / "version.info")
    monkeypatch.setattr(prerequisites, "CANN_HOMES", (str(tmp_path / "cann"),))
    monkeypatch.setattr(prerequisites, "version_of", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert [one.name for one in missing_for("npu")] == ["Ascend card", "driver", "CANN", "torch_npu"]
    (tmp_path / "cann/aarch64-linux").mkdir(parents=True)
    (tmp_path / "cann/aarch64-linux/ascend_toolkit_install.info").write_text("version=8.5.1\n")
    (tmp_path / "version.info").write_text("Version=25.2")
    monkeypatch.setattr(prerequisites, "card_files", lambda: ["/dev/davinci0"])
    monkeypatch.setattr(prerequisites, "version_of", lambda name: "2.10.0.post4")
    assert [one.name for one in missing_for("npu")] == ["CANN's environment"]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path / "cann"))
    assert missing_for("npu") == []
    smi = tmp_path / "npu-smi"
    smi.write_text("#!/bin/sh\necho 'npu-smi 25.2  910C'\n")
    smi.chmod(0o755)
    machine = prerequisites.describe_machine()
    assert (machine["cann_version"], machine["driver"]) == ("version=8.5.1", "Version=25.2")
    assert machine["npu_smi"] == "npu-smi 25.2  910C" and machine["packages"]["torch_npu"] == "2.10.0.post4"
    assert machine["variables"] == {"ASCEND_HOME_PATH": str(tmp_path / "cann")}


def test_stages_that_cannot_run_are_skipped_and_say_why(tmp_path):
    lacking = Stages("npu", None, [Missing("CANN", "install it")], timeout_s=1, folder=tmp_path)
    assert {lacking.run(name).status for name in NAMES[1:]} == {SKIPPED}
    assert lacking.run("hccl").error == "missing: CANN"
    uncounted = Stages("npu", None, [], timeout_s=1, folder=tmp_path)
    assert uncounted.run("switch").error == "the stage device found no card"


def test_a_failing_stage_is_reported_with_its_output(tmp_path):
    stages = Stages("ledger", 1, [], timeout_s=patience(60), folder=tmp_path)
    failed = stages.run("device")
    assert failed.status == FAILED and failed.error.startswith("card 0: ValueError: device.kind='ledger'")
    assert "Traceback" in failed.output
    report = SmokeReport("emulated", {}, [], [StageResult("doctor", OK), failed])
    read = json.loads(report.as_json())
    assert not read["ok"] and read["stages"][1]["error"] == failed.error
    assert lines_of(failed, 8)[1].strip() == f"→ {failed.error}"


def test_a_card_whose_memory_does_not_come_back_fails():
    from fusion.npu import open_device

    device = open_device("emulated", index=14, capacity_bytes=512 << 20)
    if device.kind != "emulated":
        pytest.skip("no compiler to build the emulated NPU with")
    figures = on_card.check_device(device)
    assert (figures["allocated_bytes"], figures["kept_bytes"]) == (on_card.BUFFER_BYTES, 0)
    leaked = []

    class Leaky(type(device)):
        def host_empty(self, *arguments):
            import torch

            leaked.append(torch.ones(9 << 20, device=self.torch_device))
            return super().host_empty(*arguments)

    device.__class__ = Leaky
    with pytest.raises(RuntimeError, match="bytes kept after the release: 75497472"):
        on_card.check_device(device)


@pytest.mark.parametrize(("cards", "used"), [(1, 1), (2, 2), (3, 2), (4, 4), (16, 4)])
def test_a_run_uses_a_number_of_cards_that_has_a_layout(cards, used, tmp_path):
    assert cards_of_a_run(cards) == used
    assert f"cluster.npus={used}" in train_command("python", tmp_path, kind="npu", cards=used)


def test_a_good_run_has_nothing_wrong():
    figures, wrong = summarise([GOOD] * STEPS)
    assert wrong == "" and figures["steps"] == STEPS and figures["step_s"] == 0.3


VALUES = st.sampled_from([0.0, 1e-3, 0.04, 0.06, 2.0, math.nan, math.inf])


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={"actor/loss": VALUES, "actor/grad_norm": VALUES, "training/rollout_logprobs_diff_mean": VALUES},
        ),
        max_size=STEPS + 1,
    )
)
def test_a_run_is_right_only_if_complete_finite_and_consistent(changes):
    rows = [GOOD | change for change in changes]
    right = (
        len(rows) == STEPS
        and all(math.isfinite(row["actor/loss"]) and math.isfinite(row["actor/grad_norm"]) for row in rows)
        and any(row["actor/grad_norm"] for row in rows)
        and all(row["training/rollout_logprobs_diff_mean"] <= LOGPROB_TOLERANCE for row in rows)
    )
    assert (summarise(rows)[1] == "") == right


def test_a_model_is_checked_with_128_and_more_experts(monkeypatch):
    from fusion.npu import open_device

    device = open_device("emulated", index=13, capacity_bytes=512 << 20)
    monkeypatch.setattr(model_checks, "EXPERTS", (130,))
    figures = model_checks.check_model(device)
    assert figures["update_diff_130"] == 0 and figures["engine_diff_130"] < 0.02


@pytest.mark.extended
def test_a_model_whose_batches_or_passes_differ_fails(monkeypatch):
    from fusion.npu import open_device

    device = open_device("emulated", index=13, capacity_bytes=512 << 20)
    monkeypatch.setattr(model_checks, "EXPERTS", (130,))
    generated = model_checks._generate
    calls = []

    def other_bits(*arguments):
        outputs = generated(*arguments)
        calls.append(arguments)
        if len(calls) == 2:
            out = outputs["request 00"]
            outputs["request 00"] = replace(out, logprobs=[out.logprobs[0] + 1e-6, *out.logprobs[1:]])
        return outputs

    monkeypatch.setattr(model_checks, "_generate", other_bits)
    with pytest.raises(RuntimeError, match="request 00 are equal in .* batches, bit by bit"):
        model_checks.check_model(device)
    monkeypatch.setattr(model_checks, "_generate", generated)
    passes = model_checks._gradients
    seen = []

    def drifting(*arguments):
        logprobs, gradients = passes(*arguments)
        seen.append(logprobs)
        return logprobs + 1e-6 * (len(seen) - 1), gradients

    monkeypatch.setattr(model_checks, "_gradients", drifting)
    with pytest.raises(RuntimeError, match="the same pass again has equal log-probabilities, bit by bit"):
        model_checks.check_model(device)


@pytest.mark.extended
def test_a_table_that_stacks_experts_is_compared_on_the_same_weights(monkeypatch):
    from fusion.npu import open_device

    device = open_device("emulated", index=13, capacity_bytes=512 << 20, operators="ascend")
    monkeypatch.setattr(model_checks, "EXPERTS", (130,))
    figures = model_checks.check_model(device)
    assert 0 < figures["composed_diff_130"] < 0.02


def test_a_card_whose_integers_are_narrower_is_found_by_its_checksums(monkeypatch):
    from fusion.npu import open_device

    device = open_device("emulated", index=12, capacity_bytes=512 << 20)
    on_card.check_checksums(device)
    by_host = on_card.run_sums
    monkeypatch.setattr(
        on_card, "run_sums", lambda wire, ends: by_host(wire, ends) % (1 << (63 if wire.is_cpu else 53))
    )
    with pytest.raises(RuntimeError, match="checksums of runs on the card and on the host"):
        on_card.check_checksums(device)
