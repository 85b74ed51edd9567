"""`scripts/plan.py` and the recipe that uses it, as a user runs them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import asdict
from math import prod
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fusion.costmodel.presets import load_shape
from fusion.costmodel.setup import PUBLISHED_WORKLOAD
from fusion.model import ModelConfig, global_params
from stalesync import planning
from stalesync.job.config import Config
from stalesync.job.overrides import register
from tests import machine
from tests.costmodel.test_shape import NAMES
from tests.helpers import tiny_config

ROOT = Path(__file__).resolve().parents[2]
PLAN = [sys.executable, "scripts/plan.py"]
RECIPE = ["bash", "recipes/cloudmatrix384_pangu_718b.sh"]


def answer(arguments):
    return planning.answer(arguments, ROOT / "recipes")


def run(command, **environment):
    given = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return machine.run(command, timeout_s=300, cwd=ROOT, env=given)


def recipe(*arguments):
    variables = {"VIRTUAL_ENV": sys.prefix, "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}", "extra": "test"}
    return run([*RECIPE, *arguments], **variables)


PUBLISHED = """data.prompts_per_step=512 algorithm.group_size=16 data.max_prompt_length=78
rollout.sampling.forced_median=1577 rollout.sampling.forced_spread=[0,0,0] rollout.max_response_length=3072""".split()
"""The arguments of PUBLISHED_WORKLOAD"""
FEW = ["data.prompts_per_step=8", "algorithm.group_size=4"]
"""Samples of a step, so that little is simulated"""


HEAVIEST = "pangu_718b"


@pytest.mark.parametrize(
    "name", [name if name == HEAVIEST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_768_dies_within_ten_seconds_and_four_gigabytes(name):
    """Of processor time, as other tests may run beside it; with one thread that is the time of a quiet machine."""
    command = [*PLAN, f"model={name}", "cluster=cloudmatrix384", "--json", os.devnull]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert machine.cpu_within(used.ru_utime + used.ru_stime, 8)
    assert used.ru_maxrss < 2e6, "kilobytes"


def test_json_tells_all_that_the_tables_tell(tmp_path, capsys):
    arguments = ["model=deepseek_r1_671b", "cluster=a3_128", "train=tp4pp8ep32", "infer=tp2ep128"]
    assert answer([*arguments, "--json", str(tmp_path / "plan.json")]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 100
    for words in (
        "HBM of a die",
        "gradients",
        "inside a supernode",
        "offload",
        "the limit is",
        "fusion.deployment=colocated",
    ):
        assert words in shown
    told = json.loads((tmp_path / "plan.json").read_text())
    assert told["layouts"] == {"train": "tp4pp8ep32", "infer": "tp2ep128"} and told["dies"] == 256 and told["fits"]
    assert set(told["bytes_by_phase_and_owner"]) == {"train", "switch", "infer"}
    moved = told["moved"]["to_generate"]
    assert 256 * sum(level["mean"] for level in moved["received"].values()) == pytest.approx(moved["total"])
    switch = told["switch"]["to_generate"]
    assert switch["pessimistic_s"] > switch["seconds"] and "pessimistic" in shown
    assert told["choice"]["reasons"] and " ".join(told["choice"]["best"][:1]) in shown
    assert told["check"]["reshard"]["published"] == 11.5 and told["recommended"]["deployment"] == "colocated"
    assert all(figure["source"] for figure in told["figures"].values())


def test_deployment_split_and_staleness_are_recommended_with_the_runner_up(tmp_path, capsys):
    job = """model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=16 data.prompts_per_step=16
    data.max_prompt_length=64 rollout.max_response_length=512 rollout.sampling.forced_median=64""".split()
    assert answer([*job, "--json", str(tmp_path / "plan.json")]) == 0
    choice = json.loads((tmp_path / "plan.json").read_text())["choice"]
    found = {(one["deployment"], one["max_staleness"]) for one in choice["options"]}
    assert found == {(name, bound) for name in ("colocated", "separate", "hybrid") for bound in (0, 1)}
    fastest = max(one["tokens_per_s"] for one in choice["options"])
    (best,) = (one for one in choice["options"] if one["keys"] == choice["best"])
    assert best["tokens_per_s"] >= fastest / 1.05 and choice["runner_up"] not in (None, choice["best"])
    shown = " ".join(capsys.readouterr().out.split())
    assert any(one.endswith(" the runner-up") or "measure both" in one for one in choice["reasons"])
    (of_least,) = (one.split()[2] for one in choice["reasons"] if "x with the least overhead of a layer" in one)
    speeds = {tuple(one["keys"]): one["tokens_per_s"] for one in choice["options"]}
    lead = speeds[tuple(choice["best"])] / speeds[tuple(choice["runner_up"])]
    assert abs(float(of_least) - lead) > 0.02, "simulated again, with less overhead"
    assert (
        " ".join(["Recommended:", *choice["best"]]) in shown and " ".join(["Runner-up:", *choice["runner_up"]]) in shown
    )
    assert answer([*job, "data.prompts_per_step=4096"]) == 0
    assert "were not simulated: 32,768 samples a step: at most 4,096 here" in " ".join(capsys.readouterr().out.split())


def test_an_error_of_the_simulator_is_not_taken_for_a_job_that_it_refuses(monkeypatch):
    def fail(run):
        raise ValueError("zip() argument 2 is shorter than argument 1")

    monkeypatch.setattr("stalesync.simulator.run.SimulatedRun.run", fail)
    job = "model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=16 data.prompts_per_step=16".split()
    with pytest.raises(RuntimeError, match="the simulator failed"):
        answer(job)


def test_a_model_that_does_not_fit_fails(capsys):
    assert answer(["model=pangu_718b", "cluster=a3_16"]) == 1
    assert "does not fit: train takes" in capsys.readouterr().out


def test_a_plan_that_does_not_fit_names_the_settings_that_do(tmp_path, capsys):
    plan = "model=qwen3_30b_a3b cluster.hardware=h100 cluster.npus=8 train=ep8 infer=ep8".split()
    assert answer([*plan, "--json", str(tmp_path / "plan.json")]) == 1
    assert "it fits with fusion.offload=stream" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "plan.json").read_text())["fits_with"] == {"fusion.offload": "stream"}
    assert answer([*plan, "fusion.offload=stream", *FEW]) == 0


@pytest.mark.extended
def test_config_groups_are_those_of_training():
    common = ["model=qwen3_30b_a3b", "cluster=a3_16", "--json", os.devnull]
    assert answer([*common, "fusion.offload=stream", "rollout.engine.kv_fraction=0.5"]) == 0
    assert answer([*common, "training.token_budget=4000000", "data.prompts_per_step=100000"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("cluster=cloudmatrix384", "model is not set: expected one of deepseek_r1_671b"),
        ("model=pangu cluster=cloudmatrix384", "model='pangu': expected one of"),
        ("model=pangu_718b", "cluster=null: expected one that names its hardware"),
        ("model=pangu_718b cluster=four", "cluster=four: expected one that names its hardware"),
        ("model=pangu_718b cluster.hardware=h100", "cluster=null: expected a cluster preset: .*four"),
        ("model=pangu_718b cluster.hardware=abacus cluster.npus=8", "cluster.hardware='abacus': expected one of asc"),
        ("model=pangu_718b cluster=a3_16 cluster.npus=no", "cluster.npus=no: expected a whole number"),
        ("model=pangu_718b cluster=a3_16 train=tp5", "train='tp5': tp=5 does not divide"),
        ("model=pangu_718b cluster=a3_16 trian=tp5", "unknown argument 'trian=tp5'; did you mean train=?"),
        ("model=pangu_718b cluster=a3_16 fusion.offload=no", "fusion.offload=.*expected one of"),
        ("model=pangu_718b cluster=a3_16 --json", "--json needs a path"),
    ],
)
def test_mistakes_are_named_by_key(arguments, message):
    with pytest.raises(ValueError, match=message):
        answer(arguments.split())


def test_a_folder_of_a_checkpoint_is_a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config().to_hf()))
    arguments = [f"model={tmp_path}", "cluster=a3_16", "cluster.npus=4", "train=tp2ep2", "infer=ep4", *FEW]
    assert answer([*arguments, "--json", os.devnull]) == 0


def test_the_recipe_plans_resolves_and_prints_without_hardware(tmp_path, tmp_path_factory):
    names = [f"host{number}" for number in range(48)]
    (tmp_path / "hosts").write_text("# the supernode\n" + "\n".join(names) + "\n")
    quoted = 'run.dir="it\'s here"'
    arguments = ["--dry-run", "--hosts", str(tmp_path / "hosts"), "--", "run.steps=7", quoted]
    done = recipe(*arguments)
    assert done.returncode == 0, done.stderr
    commands = [line for line in done.stdout.splitlines() if line.startswith("ssh ")]
    assert len(commands) == 1 + 48 + 48 + 1 + 48 + 48
    assert "host1 " in commands[0] and "getent ahostsv4 host0" in commands.pop(0), "as the others know the head"
    created, commands, removed = commands[:48], commands[48:-48], commands[-48:]
    assert all(line.rstrip("'").endswith("mkdir -m 700 /tmp/ray-RANDOM") for line in created)
    assert all(line.rstrip("'").endswith("rm -rf /tmp/ray-RANDOM") for line in removed)
    assert all("RAY_TMPDIR=/tmp/ray-RANDOM && " in line for line in commands), "of Ray and of the job that joins it"
    assert all("MALLOC_ARENA_MAX=2 RAY_task_events_report_interval_ms=0 " in line for line in commands)
    assert "host0 " in commands[0] and "--head --port=6379" in commands[0] and "NPU" in commands[0]
    assert all("--address=host0:6379" in line for line in commands[1:48])
    job = commands[48]
    for command, word in ((commands[0], '--system-config={"worker_niceness": 0}'), (job, quoted)):
        *ssh, line = shlex.split(command)  # as a shell reads it that the command is pasted into
        assert ssh == ["ssh", "-o", "BatchMode=yes", "host0", "bash", "<<<"] and word in shlex.split(line)
    assert "scripts/train.py" in job and "cluster=cloudmatrix384" in job and "run.steps=7" in job
    assert "parallel.train.pp=16" in job and "parallel.infer.ep=256" in job
    assert all(line.rstrip("'").endswith("ray stop") for line in commands[49:])
    assert "768 dies; the plan fits" in done.stdout and not list(tmp_path.glob("*/"))
    words = shlex.split(shlex.split(job)[-1])
    overrides = words[words.index("scripts/train.py") + 1 :]
    model = load_shape("pangu_718b", ROOT / "recipes" / "shapes").shape.config
    assert job_config(overrides, folder_of(model, tmp_path_factory.mktemp("model"))).validate() == model


def job_config(overrides: list[str], folder: Path) -> Config:
    """The config of a job, as `scripts/train.py` composes it."""
    register()
    with initialize_config_dir(str(ROOT / "recipes" / "conf"), version_base=None):
        return OmegaConf.to_object(compose("config", [*overrides, f"model.path={folder}", "data=addition"]))


def folder_of(config: ModelConfig, folder: Path) -> Path:
    """A checkpoint folder with the headers of a model of any size: its files are holes."""
    (folder / "config.json").write_text(json.dumps(config.to_hf("bfloat16")))
    tensors, files = list(global_params(config).items()), {}
    for first in range(0, len(tensors), 1000):
        name, header, offset = f"model-{first}.safetensors", {}, 0
        for tensor, shape in tensors[first : first + 1000]:
            end = offset + 2 * prod(shape)
            header[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
            files[tensor], offset = name, end
        text = json.dumps(header).encode()
        (folder / name).write_bytes(len(text).to_bytes(8, "little") + text)
        os.truncate(folder / name, 8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dry-run", "--hosts", "nowhere"], "--hosts nowhere: no such file"),
        (["--dry-run", "--bogus"], "unknown option --bogus"),
        (["run.steps=3"], "run.steps=3: overrides of the config come after --"),
    ],
)
def test_the_recipe_refuses_wrong_arguments_at_once(arguments, message):
    done = recipe(*arguments)
    assert done.returncode == 2 and message in done.stderr


@pytest.mark.parametrize("host", ["-oProxyCommand=id", "root@-oProxyCommand=id", "node1;id", "$(id)"])
def test_the_recipe_refuses_a_host_that_ssh_would_read_as_an_option(host, tmp_path):
    (tmp_path / "hosts").write_text(f"node0\n{host}\n")
    done = recipe("--dry-run", "--hosts", str(tmp_path / "hosts"))
    assert done.returncode == 2 and "expected a name or an address" in done.stderr and not done.stdout


@pytest.mark.extended
def test_the_recipe_fails_where_the_plan_does_not_fit():
    done = recipe("--dry-run", "train=tp1ep8")
    assert done.returncode == 2 and "the plan does not fit" in done.stderr and "ssh" not in done.stdout


FURTHER = [pytest.param(name, marks=pytest.mark.extended) for name in ("h100", "h800")]


@pytest.mark.parametrize("hardware", ["ascend_910b", *FURTHER])
def test_other_cards_are_planned_for(hardware, tmp_path):
    """Machines without supernodes and without cards of several dies: their links do not occur in any figure."""
    path = tmp_path / "plan.json"
    arguments = ["model=qwen3_30b_a3b", f"cluster.hardware={hardware}", "cluster.npus=16", "--json", str(path)]
    assert answer([*arguments, "train=tp2pp2ep8", "infer=ep16", *FEW]) == 0
    plan = json.loads(path.read_text())
    assert plan["hardware"] == hardware and plan["nodes"] == 2 and plan["recommended"]
    assert {"node link", "network link"} <= set(plan["figures"])
    assert not {"card link", "supernode link"} & set(plan["figures"])
    for way in plan["moved"].values():
        assert way["received"]["network"]["most"] > 0
        assert way["received"]["card"]["most"] == way["received"]["supernode"]["most"] == 0


def test_overrides_take_the_place_of_the_presets_hardware_and_dies(tmp_path, capsys):
    path = tmp_path / "plan.json"
    arguments = ["model=qwen3_30b_a3b", "cluster=four", "cluster.hardware=h100", "train=tp2ep2", "infer=ep4"]
    status = answer([*arguments, "--json", str(path)])
    plan = json.loads(path.read_text())
    assert (plan["hardware"], plan["dies"]) == ("h100", 4) and status == (not plan["fits"])
    capsys.readouterr()
    assert answer([*arguments, "--json", "-"]) == status and json.loads(capsys.readouterr().out) == plan


@pytest.mark.parametrize("plan", json.loads((Path(__file__).parent / "plans_910c.json").read_text()))
def test_figures_of_the_910c_stay(plan, tmp_path):
    """Every number of two plans for the published workload, to the last digit."""
    path = tmp_path / "plan.json"
    answer([*plan["arguments"], *PUBLISHED, "--json", str(path)])
    shown = json.loads(path.read_text())
    assert shown.pop("workload") == asdict(PUBLISHED_WORKLOAD)
    found = dict(_numbers(shown))
    wanted = plan["numbers"]
    assert set(found) == set(wanted)
    for key, value in wanted.items():
        assert found[key] == pytest.approx(value, rel=1e-12), key


def _numbers(value, path=""):
    """(path of keys, number) of everything in a plan that is one; texts are left out."""
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _numbers(inner, f"{path}/{key}")
    elif isinstance(value, int | float):
        yield path, value
