"""Every command answers --help, and refuses wrong arguments, without loading torch or Ray."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from stalesync.job.overrides import known_keys
from tests.machine import cpu_within, run

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"torch", "ray", "transformers"}
BENCHMARKS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py") if "\nBENCHMARK = " in path.read_text())
QUICKSTART = (
    "run.name=quickstart run.steps=80 model.path=runs/base/addition cluster=four device=emulated parallel=tp2ep2_ep4 "
    "data=addition data.max_prompt_length=8 reward=arithmetic rollout.max_response_length=5 algorithm=grpo "
    "algorithm.group_size=8 algorithm.minibatches=2 algorithm.kl_coef=0.001 training.lr=5e-4 training.betas=[0.9,0.99]"
)


@dataclass
class Answer:
    code: int
    out: str
    err: str
    cpu_s: float
    imported: set[str]


def answer_of(command: str, folder: Path) -> Answer:
    """Runs a command and reports what it printed, the top-level modules it imported, and its CPU time."""
    out, err = folder / "out", folder / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        words = [sys.executable, "-X", "importtime", *command.split()]
        child = subprocess.Popen(words, cwd=ROOT, stdout=stdout, stderr=stderr, env=os.environ | {"COLUMNS": "120"})
        _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    printed = err.read_text().splitlines()
    imports = [line for line in printed if line.startswith("import time:")]
    rest = "\n".join(line for line in printed if not line.startswith("import time:"))
    modules = {re.split(r"\|\s*", line)[-1].split(".")[0] for line in imports}
    return Answer(child.returncode, out.read_text(), rest, usage.ru_utime + usage.ru_stime, modules)


def is_quick(answer: Answer) -> bool:
    return not HEAVY & answer.imported and cpu_within(answer.cpu_s, 1.0)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("scripts/train.py --help", "KEY=VALUE"),
        (f"scripts/train.py --cfg job {QUICKSTART}", "path: runs/base/addition"),
        ("scripts/control.py --help", "rollout.engine.kv_fraction"),
        ("scripts/plan.py --help", "model=NAME"),
        ("scripts/simulate.py --help", "supernodes="),
        ("scripts/report.py --help", "folder"),
        ("scripts/convert.py --help", "RUN_OR_CHECKPOINT OUT"),
        ("scripts/evaluate.py --help", "RUN_OR_MODEL"),
        ("scripts/doctor.py --help", "--quick"),
        ("scripts/make_base.py --help", "worked_arithmetic"),
        ("scripts/sft.py --help", "CHATS.jsonl MODEL_FOLDER"),
        ("scripts/check.py --help", "Exits"),
        ("scripts/docs/config_reference.py --help", "as Markdown"),
        ("-m distqueue --help", "--watch"),
        *(pytest.param(f"benchmarks/{name} --help", "--json", marks=pytest.mark.extended) for name in BENCHMARKS),
    ],
)
def test_help_answers_in_a_second_of_cpu(command, part, tmp_path):
    answer = answer_of(command, tmp_path)
    assert answer.code == 0 and part in answer.out, answer.err
    assert is_quick(answer), (answer.cpu_s, HEAVY & answer.imported)


CONSOLE = "-c import sys; sys.argv = ['rlfusion', '--help']; from stalesync.console import main; main()"


@pytest.mark.parametrize(
    "command",
    [*(f"scripts/{name}.py --help" for name in ("train", "check", "report", "plan", "doctor")), "-m distqueue --help"]
    + [CONSOLE, "scripts/docs/config_reference.py"],
)
def test_a_reader_that_has_ended_is_no_failure(command):
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed:
        command = [sys.executable, *command.split(" ", 1 if command == CONSOLE else -1)]
        done = run(command, 60, cwd=ROOT, stdout=closed)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE if "scripts/doctor.py" in command else 0, "")


SAID_ELSEWHERE = [
    ("scripts/train.py algorithm.name=ppo", "algorithm.name='ppo': expected one of grpo, "),
    ("scripts/plan.py model=pangu_718b clutser=a3_16", "unknown argument 'clutser=a3_16'; did you mean cluster=?"),
    ("scripts/plan.py model=pangu_718b cluster=a3_16 fusion.offload=disk", "fusion.offload='disk': expected one"),
    ("scripts/simulate.py clutser=a3_16", "unknown argument 'clutser=a3_16'; did you mean cluster=?"),
    ("scripts/train.py eval.samples=0 model.path=x", "eval.samples=0: expected a whole number of at least 1"),
    ("scripts/train.py eval.file=[a.jsonl]", "unknown key 'eval.file'; did you mean 'eval.files'?"),
    ("scripts/evaluate.py nowhere eval.sampels=2", "unknown key 'eval.sampels'; did you mean 'eval.samples'?"),
]
"""Refusals that tests of their packages read in the default run: training, costmodel, stalesync"""


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (
            "scripts/train.py rollout.temprature=1",
            "unknown key 'rollout.temprature'; did you mean 'rollout.sampling.temperat",
        ),
        ("scripts/train.py model.path=x quickly", "'quickly': expected KEY=VALUE or GROUP=CHOICE"),
        ("scripts/train.py", "model.path='': expected a Hugging Face checkpoint folder"),
        (
            "scripts/train.py model.path=x",
            "data.source='': expected addition, worked_arithmetic, counting, calculator, guess, a path ending in",
        ),
        (
            r"scripts/train.py rollout.sampling.stop=['x\n']",
            "rollout.sampling.stop=['x\\\\n']: expected a list of texts, none of them empty, with a line end",
        ),
        (r"scripts/train.py rollout.sampling.stop=['\nUser:']", "a line end (bash: $'\\n') instead of \\n"),
        ("scripts/train.py environment=my.py:Env", "environment=my.py:Env: expected one of calculator, custom, "),
        ("scripts/check.py", "model.path='': expected a Hugging Face checkpoint folder"),
        ("scripts/control.py", "the following arguments are required"),
        ("scripts/control.py runs/x rollout.engine.max_seqs", "'rollout.engine.max_seqs': expected KEY=VALUE"),
        ("scripts/plan.py", "model= and cluster= are required"),
        ("scripts/simulate.py", "model= and cluster= are required"),
        ("benchmarks/switch.py --pairs TP2", "unknown pairs ['TP2']: expected some of"),
        ("benchmarks/switch.py --only x", "unrecognized arguments: --only"),
        (
            "benchmarks/growth.py --only memori",
            "--only: expected some of controller, queue, memory, got memori",
        ),
        ("benchmarks/drafts.py --texts x", "--texts has an effect with --only texts"),
        ("benchmarks/stalesync.py --calibrate --json x", "--json is written only without --calibrate"),
        ("benchmarks/stalesync.py --calibrate --lending", "--calibrate and --lending exclude each other"),
        ("scripts/report.py", "the following arguments are required"),
        ("scripts/report.py nowhere", "nowhere: expected the folder of a run"),
        ("scripts/convert.py nowhere out", "nowhere: expected the folder of a run, or of a checkpoint"),
        ("scripts/convert.py nowhere", "the following arguments are required: OUT"),
        ("scripts/evaluate.py", "expected the folder of a run, a checkpoint or a model"),
        ("scripts/evaluate.py nowhere", "nowhere: expected the folder of a run (with config.yaml)"),
        ("scripts/doctor.py --fast", "unrecognized arguments: --fast"),
        ("scripts/docs/config_reference.py run.steps", "unrecognized arguments: run.steps"),
        ("scripts/make_base.py", "the following arguments are required"),
        ("scripts/sft.py chats.jsonl model", "the following arguments are required: folder"),
        ("scripts/make_base.py addition out --shape nowhere.yaml", "--shape nowhere.yaml: "),
        ("scripts/make_base.py addition out --target nan", "--target nan: expected a share from 0 to 1"),
        ("scripts/make_base.py addition out --device gpu", "--device: invalid choice: 'gpu'"),
        ("-m distqueue --every 2", "unrecognized arguments: --every"),
        *(pytest.param(*case, marks=pytest.mark.extended) for case in SAID_ELSEWHERE),
    ],
)
def test_wrong_arguments_print_the_usage_and_exit_with_2(command, error, tmp_path):
    answer = answer_of(command, tmp_path)
    assert answer.code == 2 and answer.err.startswith("usage: ") and error in answer.err, answer.err
    assert is_quick(answer), (answer.cpu_s, HEAVY & answer.imported)


def test_train_help_lists_every_key_and_every_choice(tmp_path):
    listed = answer_of("scripts/train.py --help", tmp_path).out
    assert all(f"\n  {key}=" in listed for key in known_keys())
    assert "algorithm: dapo, dr_grpo, grpo" in listed and "\n  run.steps=100\n      Number of training steps" in listed


def test_the_environment_of_an_unknown_backend_is_refused():
    for arguments in (["--backend", "sglang"], ["--backend"], ["vllm"], ["--backend", "vllm", "--device", "npu"]):
        command = ["bash", ROOT / "scripts/environment.sh", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (
            done.returncode == 2
            and "usage: bash scripts/environment.sh [--backend vllm [--device cuda]]" in done.stderr
        )


@pytest.mark.parametrize(
    "line, venv",
    [
        ("source scripts/environment.sh", ".venv"),
        ("source scripts/environment.sh rollout.backend=vllm", ".venv-vllm-cuda"),
        ("source scripts/environment.sh rollout.backend=vllm device=emulated", ".venv-vllm"),
        ("device=emulated source scripts/environment.sh rollout.backend=vllm", ".venv-vllm"),
        ("device=emulated source scripts/environment.sh rollout.backend=vllm device.kind=cuda", ".venv-vllm-cuda"),
    ],
)
def test_emulated_cards_get_vllm_for_the_cpu_beside_that_of_cuda(line, venv, tmp_path):
    for name in ("scripts/environment.sh", "requirements/vllm-cpu.txt", "requirements/vllm-cuda.txt", "setup.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text() if name.endswith(".sh") else "")
    for name in (".venv", ".venv-vllm", ".venv-vllm-cuda"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin/activate").write_text(
            f'VIRTUAL_ENV="{tmp_path / name}" PATH="{tmp_path}/{name}/bin:$PATH"'
        )
        (tmp_path / name / "bin/python").write_text("#!/bin/sh\n")  # installs nothing
        (tmp_path / name / "bin/python").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("#!/bin/sh\nexit 1\n")  # has no vLLM
    (tmp_path / "bin/python").chmod(0o755)
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
    command = ["bash", "-euc", f'{line} > "$0"; echo "$VIRTUAL_ENV"', "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.split()[:1] == [str(tmp_path / venv)], done.stderr
