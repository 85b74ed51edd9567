"""Plan, simulation and run answer for one job: every key is read, irrelevant by a stated list, or refused by name."""

import contextlib
import copy
import functools
import io
import json
from dataclasses import asdict

import pytest

from fusion.costmodel.setup import PUBLISHED_WORKLOAD
from fusion.resources import RECIPES
from stalesync import planning
from stalesync.job.config import Config
from stalesync.job.job_arguments import job_config, parse, unread_keys
from stalesync.job.keys import keys_of, value_of
from stalesync.job.overrides import composed, known_keys
from stalesync.job.workload import describe, lengths_of, workload_of
from stalesync.simulator import command_line as simulator

CONF = (RECIPES / "conf").absolute()
JOB = """model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=8 data.prompts_per_step=16 data.max_prompt_length=64
algorithm.group_size=4 rollout.max_response_length=512 rollout.sampling.forced_median=64""".split()
QUICK = {"data.prompts_per_step", "rollout.max_response_length"}
HYBRID = ("fusion=hybrid", "stalesync.max_staleness=1", "run.steps=4")
POOL = (*HYBRID, "rollout.kv_pool.suspended=pool", "rollout.schedule.chunk_tokens=16")
MANY = ("rollout.engine.max_seqs=4096", "data.prompts_per_step=4096")
COMMANDS = {"plan": planning, "simulate": simulator}
CONTEXTS = {
    "fusion.infer_cards": HYBRID,
    "fusion.double_buffer": HYBRID,
    "fusion.score_cards": ("algorithm.kl_coef=0.1",),
    "fusion.bucket_bytes": MANY,
    "fusion.offload": HYBRID,
    "stalesync.train_tokens": HYBRID,
    "stalesync.lend": (*HYBRID, "rollout.max_response_length=4096"),
    "rollout.schedule.order": (*HYBRID, "rollout.engine.max_seqs=2"),
    "rollout.engine.max_batch_tokens": ("rollout.engine.max_seqs=16",),
    "rollout.engine.block_size": ("rollout.engine.max_kv_tokens=1200", "rollout.engine.max_seqs=8"),
    "stalesync.max_staleness": ("run.steps=4",),
    "rollout.kv_pool.suspended": HYBRID,
    "rollout.kv_pool.spread": POOL,
    "rollout.kv_pool.pull_tokens": POOL,
    "rollout.engine.kv_fraction": MANY,
    "training.lora.targets": ("training.lora.rank=16",),
    "training.share_prefixes": ("data.max_prompt_length=512",),
    "reward.workers": ("reward.latency_s=1",),
    "parallel.infer.dcp": ("model=moonlight_16b_a3b", "parallel.infer.tp=8"),
}
"""Arguments beside which a key has an effect; those of a simulation only are left out of a plan."""
VALUES = {
    "training.token_budget": "256",  # less than the tokens of a card
    "cluster.hardware": "h100",
    "cluster.address": "auto",
    "fusion.deployment": "hybrid",
    "rollout.drafts.source": "both",
    "fusion.resident": "one",
    "fusion.offload": "none",
    "fusion.infer_cards": "2",
    "fusion.score_cards": "4",
    "training.recompute": "false",
    "training.share_prefixes": "off",
    "training.lora.targets": "[attention]",
    "cluster.npus": "16",
    "parallel.train.tp": "4",
    "parallel.infer.dcp": "2",
    "rollout.max_response_length": "1024",
    "fusion.bucket_bytes": str(4 << 30),
    "data.prompts_per_step": "32",
    "model.path": "moonlight_16b_a3b",
    "rollout.sampling.forced_spread": "[0.1,0.1,0.1]",
    "rollout.schedule.order": "fifo",
    "rollout.schedule.chunk_tokens": "16",
    "rollout.kv_pool.suspended": "keep",
    "rollout.engine.max_kv_tokens": "700",
    "rollout.engine.kv_fraction": "0.2",
    "rollout.kv_pool.spread": "0",
    "rollout.kv_pool.pull_tokens": "1",
    "rollout.engine.max_batch_tokens": "96",
    "rollout.engine.max_seqs": "2",
    "rollout.engine.block_size": "256",
    "algorithm.kl_coef": "0.1",
    "stalesync.train_tokens": "2000",
    "data.rows": "7",
}
"""Other values of keys for which `other` finds none that is accepted, or has an effect."""


def other(key):
    """Another value of a key, as text."""
    value = value_of(Config(), key)
    if key in VALUES:
        return VALUES[key]
    if isinstance(value, bool):
        return str(not value).lower()
    if isinstance(value, int | float):
        return str(value * 2 or 1)
    return "[x]" if isinstance(value, list) else "1" if value is None else "other"


def read_by(command):
    return sorted(path for path, key in keys_of(Config).items() if command in key.use.read_by)


@functools.cache
def told(command, arguments):
    """What a command writes for arguments."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        COMMANDS[command].answer([*arguments, "--json", "-"], RECIPES)
    return json.loads(printed.getvalue())


def figures(command, arguments):
    """What a command computes for arguments, without what it prints of these."""
    shown = told(command, arguments)
    return json.dumps({key: shown[key] for key in shown.keys() - {"notes", "workload", "config", "lengths"}})


def arguments_of(command, key, *more):
    replaced = {argument.split("=")[0] for argument in more} | ({"model"} if key == "model.path" and more else set())
    context = CONTEXTS.get(key, ())
    if command == "plan":
        context = [one for one in context if one.split("=")[0] in {*planning.OPTIONS, *read_by("plan")}]
    else:
        context = ["run.steps=3", *context]
    words = {word.split("=")[0]: word for word in (*JOB, *context)}
    return (*(word for name, word in words.items() if name not in replaced), *more)


def changed(config, key):
    """The config with another value of a key."""
    other_config = copy.deepcopy(config)
    *path, name = key.split(".")
    setattr(functools.reduce(getattr, path, other_config), name, object())
    return other_config


@pytest.mark.parametrize("command", COMMANDS)
def test_every_key_is_read_or_timeless_or_refused(command):
    reads, config, base = {*read_by(command)}, composed(CONF, []), composed(CONF, [])
    timeless = {path for path, key in keys_of(Config).items() if key.use.timeless}
    for key in known_keys():
        found = unread_keys(changed(config, key), base, command)
        assert found == ([] if key in reads | timeless else [key])
    assert {"run.name", "eval.every", "data.source", "training.lr", "reward.path", "device.kind"} < timeless
    matter = {key for key in known_keys() if key.startswith(("rollout.draft", "rollout.kv_", "queue.", "fusion."))}
    assert not timeless & (matter | {"reward.model", "model.dtype", "algorithm.replay"}), "they change what a run takes"


@pytest.mark.parametrize(
    ("command", "key"),
    [
        pytest.param(name, key, marks=() if key in QUICK else pytest.mark.extended)
        for name in COMMANDS
        for key in read_by(name)
    ],
)
def test_a_key_that_is_read_changes_the_figures(command, key):
    assert figures(command, arguments_of(command, key, f"{key}={other(key)}")) != figures(
        command, arguments_of(command, key)
    )


@pytest.mark.parametrize("command", COMMANDS)
def test_a_key_that_is_not_modelled_is_refused_or_listed(command):
    module = COMMANDS[command]

    def of(*arguments):
        parsed = parse([*JOB, *arguments], options=module.OPTIONS, flags=[], conf=CONF)
        return job_config(parsed, CONF, command=command, defaults=module.DEFAULTS)

    with pytest.raises(
        ValueError, match=f"rollout.schedule.probe=0: expected null, as {command}.py does not model this"
    ):
        of("rollout.schedule.probe=0")
    assert of("rollout.schedule.probe=0", "--job")[1][-1] == "not modelled: rollout.schedule.probe=0"
    assert of("model.dtype=bfloat16", "data=file", "data.source=x.jsonl", "run.name=x", "reward=math")
    with pytest.raises(ValueError, match="model.dtype=float32: expected bfloat16"):
        of("model=float32")


def test_a_plan_lists_what_only_the_deployments_that_it_simulates_model():
    drafted = "rollout.drafts.source=both algorithm.kl_coef=0.1 stalesync.max_staleness=1 rollout.schedule.probe=0"
    plain, found = told("plan", tuple(JOB)), told("plan", (*JOB, "--job", *drafted.split()))
    notes = [line for line in found["notes"] if "modelled" in line or "drafts" in line]
    assert notes == [
        "modelled in the simulated deployments only: rollout.drafts.source=both algorithm.kl_coef=0.1",
        "not modelled: rollout.schedule.probe=0 stalesync.max_staleness=1",
        "drafts: acceptance is an input, as published (Seer, RhymeRL); simulate.py measures it on texts=",
    ]
    assert found["ranking"] == plain["ranking"] and found["choice"]["options"] != plain["choice"]["options"]


def test_plan_simulation_and_run_share_one_workload():
    config = composed(CONF, [word for word in JOB[3:]])
    work = workload_of(config)
    assert (work.samples, work.prompt, work.longest) == (64, 64, 512)
    assert (
        simulator.scenario_of(
            parse(JOB, options=simulator.OPTIONS, flags=[], conf=CONF), RECIPES
        ).config.data.prompts_per_step
        * 4
        == work.samples
    )
    shown = told("plan", tuple(JOB))
    assert shown["workload"] == asdict(work) and describe(config) in shown["notes"]


def test_lengths_that_are_not_stated_follow_a_stated_rule():
    config = composed(CONF, ["rollout.max_response_length=8000"])
    assert "a median of 1,000 (0.125 of it, as rollout.sampling.forced_median=null)" in describe(config)
    lengths = lengths_of(config)
    drawn = [length for one in range(4000) for length in lengths.of_members(f"e0-{one}", range(2))]
    assert sum(drawn) / len(drawn) == pytest.approx(workload_of(config).response, rel=0.05)


def test_the_published_workload_is_stated_by_arguments():
    stated = """data.prompts_per_step=512 algorithm.group_size=16 data.max_prompt_length=78
    rollout.sampling.forced_median=1577 rollout.sampling.forced_spread=[0,0,0] rollout.max_response_length=3072"""
    assert workload_of(composed(CONF, stated.split())) == PUBLISHED_WORKLOAD


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_that_it_takes_auto_to_be_off(command):
    def notes(length):
        options = COMMANDS[command].OPTIONS
        parsed = parse([*JOB, f"rollout.max_response_length={length}"], options=options, flags=[], conf=CONF)
        return job_config(parsed, CONF, command=command, defaults=())[1]

    keys = "rollout.schedule.chunk_tokens rollout.drafts.source"
    assert f"taken to be off, although a run may resolve auto: {keys}" in notes(1024)
    assert not any("auto" in line for line in notes(1023))
