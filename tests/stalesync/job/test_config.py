"""Bad config is refused before anything starts, by key."""

import ast
import dataclasses
import functools
import inspect
import math
import re
import sys
import textwrap
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from fusion.model.options import InferLayoutConfig, LayoutConfig, TrainLayoutConfig
from fusion.training.config import ALGORITHMS
from stalesync.job.config import Config
from stalesync.job.overrides import check_overrides, known_keys, register
from tests import machine
from tests.helpers import tiny_checkpoint
from tests.stalesync.job.jobs import PACED, job_of

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


def test_the_default_job_is_valid(checkpoint):
    assert job_of(checkpoint).validate().num_experts == 8


def test_what_corrects_older_samples_follows_the_bound_where_nothing_is_chosen(checkpoint):
    for staleness, chosen, expected in ((0, None, "none"), (1, None, "decoupled"), (1, "none", "none")):
        config = job_of(checkpoint, stalesync__max_staleness=staleness, algorithm__correction=chosen)
        assert config.resolved().algorithm.correction == expected
        assert config.algorithm.correction == chosen
    job_of(checkpoint, stalesync__max_staleness=1, algorithm__correction_cap=3.0).validate()


def test_a_group_has_a_probe_where_siblings_are_drafted_from(checkpoint):
    for drafts, chosen, expected in (("none", None, 0), ("history", None, 0), ("siblings", None, 1), ("both", 0, 0)):
        config = job_of(checkpoint, rollout__drafts__source=drafts, rollout__schedule__probe=chosen)
        config.validate()
        assert config.rollout.num_probes == expected
    job_of(checkpoint, rollout__drafts__source="both", rollout__schedule__probe=7, rollout__drafts__tree=2).validate()


@pytest.mark.parametrize(
    "changes",
    [{"rollout__schedule__chunk_tokens": 8}, {"fusion__deployment": "hybrid", "stalesync__max_staleness": 1}],
)
def test_kv_is_pooled_where_requests_leave_their_engine_before_the_weights_change(checkpoint, changes):
    job_of(checkpoint, rollout__kv_pool__suspended="pool", **changes).validate()


def test_histopipe_needs_two_steps_in_progress(checkpoint):
    pipe = {"rollout__schedule__order": "histopipe", "rollout__schedule__length_classes": 2}
    job_of(checkpoint, stalesync__max_staleness=1, **pipe).validate()
    with pytest.raises(
        ValueError, match="rollout.schedule.order=histopipe: expected another one with stalesync.max_staleness=0"
    ):
        job_of(checkpoint, **pipe).validate()
    with pytest.raises(
        ValueError, match=r"rollout.schedule.length_classes=.*the default\) with rollout.schedule.order=history"
    ):
        job_of(checkpoint, rollout__schedule__length_classes=2).validate()


@pytest.mark.parametrize(
    ("order", "problem"),
    [("shortest", "expected one of fifo, .*, or module:Class"), ("no_such_module:Shortest", "cannot be imported")],
)
def test_an_order_that_cannot_be_found_is_refused_before_a_worker_starts(checkpoint, order, problem):
    with pytest.raises(ValueError, match=f"rollout.schedule.order=.{{0,1}}{order}.{{0,1}}: {problem}"):
        job_of(checkpoint, rollout__schedule__order=order).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rollout__sampling__temperature": 0.0},
            "rollout.sampling.temperature=0.0: expected above 0, .*eval.temperature=0 evaluates",
        ),
        ({"rollout__sampling__top_k": 1}, "rollout.sampling.top_k=1: expected 0, or at least 2"),
        ({"rollout__sampling__min_p": 1.0}, "rollout.sampling.min_p=1.0: expected below 1"),
        (
            {"algorithm__name": "reinforce_plus_plus", "algorithm__group_size": 1, "data__prompts_per_step": 1},
            "data.prompts_per_step=1: expected at least 2 with algorithm.group_size=1",
        ),
    ],
)
def test_a_job_that_cannot_learn_is_refused_where_it_trains(checkpoint, changes, message):
    config = job_of(checkpoint, cluster__npus=1, **changes)
    with pytest.raises(ValueError, match=message):
        config.validate()
    config.validate(trains=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model__path": ""}, "model.path='': expected a Hugging Face checkpoint folder"),
        ({"data__source": ""}, "data.source='': expected addition, .* .data=file data.source=FILE, data=add"),
        ({"model__path": "nowhere"}, "model.path: nowhere.* does not exist"),
        ({"model__dtype": "float8"}, "model.dtype='float8': expected one of"),
        ({"parallel__train": LayoutConfig(tp=3)}, r"parallel.train: tp=3 does not .* 4 ranks .* one of 1, 2, 4 "),
        ({"parallel__infer": InferLayoutConfig(ep=3)}, r"parallel.infer: ep=3 does not divide the 4 ranks"),
        (
            {"parallel__train": TrainLayoutConfig(tp=2, cp=4)},
            "parallel.train: cp=4 does not divide the 2 data-parallel ranks: expected one of 1, 2",
        ),
        (
            {"parallel__train": TrainLayoutConfig(cp=8), "cluster__npus": 8},
            r"parallel.train.cp=8 x tp=1 does not divide the model's num_attention_heads=4: .* one of 1, 2, 4",
        ),
        (
            {"parallel__infer": InferLayoutConfig(tp=2, dcp=4)},
            "parallel.infer: dcp=4 does not divide tp=2: expected one of 1, 2",
        ),
        (
            {"parallel__infer": InferLayoutConfig(tp=4, dcp=4)},
            "parallel.infer.dcp=4: with tp=4 the same keys and values are on 2 of the ranks, .* expected one of 1, 2",
        ),
        ({"parallel__infer": InferLayoutConfig(dcp=0)}, "parallel.infer.dcp=0: expected a whole number of at least 1"),
        (
            {"parallel__infer": InferLayoutConfig(tp=4, dcp=2), "rollout__engine__batch_invariant": True},
            "parallel.infer.dcp=2: expected 1 with rollout.engine.batch_invariant=true, as partial sums",
        ),
        (
            {"parallel__infer": InferLayoutConfig(tp=4, dcp=2), "rollout__backend": "vllm"},
            "parallel.infer.dcp=2: its KV cache is not divided so; change it, or rollout.backend=embedded",
        ),
        (
            {
                "parallel__infer": InferLayoutConfig(tp=4, dcp=2),
                "rollout__max_response_length": 32,
                "rollout__engine__max_kv_tokens": 63,
            },
            "rollout.engine.max_kv_tokens=63: .* = 48 tokens. in whole blocks of rollout.engine.block_size=32",
        ),
        ({"parallel__infer": InferLayoutConfig(ep=16), "cluster__npus": 16}, "ep=16 does not divide .* num_experts=8"),
        ({"parallel__train": LayoutConfig(pp=4)}, "parallel.train.pp=4 exceeds the model's num_hidden_layers=2"),
        ({"parallel__infer": InferLayoutConfig(ep=2, etp=4)}, "parallel.infer: ep x etp=8 does not divide the 4 ranks"),
        ({"queue__durability": "disk"}, "queue.durability='disk': expected one of memory, journal"),
        ({"queue__max_bytes": 4095}, "queue.max_bytes=4095: expected a whole number of at least 4096, or null"),
        ({"queue__spill": "here"}, "queue.spill='here': expected an absolute path"),
        (
            {"queue__spill": "/d", "queue__durability": "journal"},
            "queue.spill='/d': expected null, as the samples",
        ),
        ({"algorithm__minibatches": 3}, "algorithm.minibatches=3 does not divide data.prompts_per_step=64"),
        (
            {"data__prompts_per_step": 1, "algorithm__group_size": 2, "algorithm__minibatches": 1},
            "a minibatch has 2 samples .* fewer than the 4 data-parallel replicas",
        ),
        ({"reward__name": "environment"}, "reward.name=environment: expected another one with environment.name=single"),
        (
            {"environment__name": "guess", "data__chat_template": "never"},
            "data.chat_template=never: expected auto with environment.name=guess",
        ),
        (
            {"environment__name": "guess", "environment__episode_timeout_s": 1800},
            "environment.episode_timeout_s=1800: expected less than cluster.stage_timeout_s=1800",
        ),
        ({"algorithm__overlong_buffer": 999}, "algorithm.overlong_buffer=999 exceeds rollout.max_response_length="),
        ({"rollout__max_response_length": 2000}, "exceeds the model's max_position_embeddings=1024"),
        (
            {"rollout__max_length": 31},
            "rollout.max_length=31: expected null, or at least the longest sample, .* = 32 tok",
        ),
        (
            {"rollout__engine__max_kv_tokens": 10},
            "rollout.engine.max_kv_tokens=10: expected null, or at least the longest sample",
        ),
        (
            {"rollout__engine__max_kv_tokens": 47, "rollout__engine__block_size": 48},
            "rollout.engine.max_kv_tokens=47: .*rollout.engine.block_size=48",
        ),
        ({"training__token_budget": 20}, "training.token_budget=20 is less than the longest sample"),
        (
            {"rollout__drafts__source": "both", "rollout__schedule__probe": 8},
            "rollout.schedule.probe=8: expected fewer than algorithm.group_size",
        ),
        ({"rollout__schedule__probe": -1}, "rollout.schedule.probe=-1: expected a whole number of at least 0, or null"),
        (
            {"rollout__schedule__probe": 1},
            "rollout.schedule.probe=1: expected 0 or null with rollout.drafts.source=none",
        ),
        (
            {"rollout__drafts__source": "siblings", "rollout__drafts__history": 2},
            r"rollout.drafts.history=2: expected 1 ",
        ),
        (
            {"rollout__drafts__source": "history", "rollout__schedule__probe": 1},
            "rollout.schedule.probe=1: .* rollout.drafts.source=history",
        ),
        (
            {"rollout__kv_pool__remote": "none"},
            r"rollout.kv_pool.remote='none': expected \"ray\" .* with rollout.kv_pool.suspended=recompute",
        ),
        ({"rollout__kv_pool__remote": "tcp"}, "rollout.kv_pool.remote='tcp': expected one of none, ray"),
        (
            {"rollout__drafts__tree": 2},
            r"rollout.drafts.tree=2: expected null \(the default\) with rollout.drafts.source=none",
        ),
        (
            {"rollout__drafts__mib": 64},
            r"rollout.drafts.mib=64: expected 1024 \(the default\) with rollout.drafts.source=none",
        ),
        ({"rollout__sampling__top_p": 1.5}, r"rollout.sampling.top_p=1.5: expected a number in \(0, 1\]"),
        ({"stalesync__max_staleness": -1}, "stalesync.max_staleness=-1"),
        (
            {"stalesync__train_tokens": 100},
            "stalesync.train_tokens=100: expected null .* with stalesync.max_staleness=0, where",
        ),
        (
            {"stalesync__max_staleness": 1, "stalesync__train_tokens": 0},
            "stalesync.train_tokens=0: expected a whole",
        ),
        ({"device__kind": "tpu"}, "device.kind=.*tpu.*: expected one of"),
        ({"reward__name": "vibes"}, "reward.name='vibes'"),
        ({"cluster__npus": 0}, r"cluster.npus=0: expected a whole number in \[1, 100000\]"),
        ({"cluster__npus": 1 << 31}, r"cluster.npus=2147483648: expected a whole number in \[1, 100000\]"),
        ({"fusion__deployment": "shared"}, "fusion.deployment='shared': expected one of separate, colocated, full, hy"),
        (
            {"fusion__deployment": "separate", "parallel__train": LayoutConfig(ep=4)},
            r"parallel.train: ep=4 does not divide the 2 ranks .* \(cluster.npus=4; 2 of them in fusion.deployment=sep",
        ),
        (
            {"fusion__deployment": "hybrid", "fusion__infer_cards": 1, "parallel__infer": InferLayoutConfig(tp=2)},
            "parallel.infer: an engine takes 2 cards, which does not divide the 3 cards that train and generate",
        ),
        ({"fusion__score_cards": 2}, "fusion.score_cards=2: nothing would run on them, as algorithm.kl_coef is 0"),
        (
            {"fusion__score_cards": 2, "algorithm__kl_coef": 0.1, "parallel__score": LayoutConfig(tp=4)},
            "parallel.score: tp=4 does not divide the 2 ranks of the layout",
        ),
        (
            {"fusion__score_cards": 2, "algorithm__kl_coef": 0.1, "parallel__score": LayoutConfig(pp=2)},
            "parallel.score.pp=2: expected 1",
        ),
        (
            {"fusion__double_buffer": True},
            "fusion.double_buffer=true: expected .*colocated, .*separate or hybrid and stalesync.max_staleness above 0",
        ),
        (
            {"rollout__kv_pool__suspended": "pool", "rollout__schedule__chunk_tokens": 16},
            "rollout.kv_pool.suspended=pool: expected rollout.schedule.chunk_tokens below .*length=16, or .*",
        ),
        ({"reward__model": "nowhere"}, "reward.model: nowhere.* does not exist"),
        (
            {"reward__model": "judge", "reward__path": "judge.py:score"},
            "reward.model='judge' and reward.path='judge.py",
        ),
        (
            {"rollout__sampling__forced_median": 17.0},
            "rollout.sampling.forced_median=17.0: expected 1 to rollout.max_response_length=16",
        ),
        (
            {"device__pace": "qwen3_30b_a3b"},
            "device.pace='qwen3_30b_a3b': expected null .* with device.kind=auto; .* with device.kind=emulated",
        ),
        ({**PACED, "cluster__hardware": None}, "device.pace=qwen3_30b_a3b: expected cluster.hardware to name"),
        ({**PACED, "device__pace": "abacus"}, "device.pace='abacus': expected one of .*qwen3_30b_a3b"),
        ({**PACED, "device__pace_tokens": 0}, "device.pace_tokens=0: expected a whole number of at least 1"),
        ({**PACED, "device__pace_speed": 0.0}, "device.pace_speed=0.0: expected a number above 0"),
        (
            {"reward__latency_s": 1.0},
            "reward.latency_s=1.0: expected 0.0 .* with device.pace=null; it is used with device.pace set",
        ),
        ({"run__steps": 0}, "run.steps=0: expected a whole number of at least 1"),
    ],
)
def test_what_does_not_fit_is_said_with_its_key(checkpoint, changes, message):
    with pytest.raises(ValueError, match=message):
        job_of(checkpoint, **changes).validate()


NO_BOUND = {"run.seed": "any whole number is a seed", "eval.pass_reward": "rewards may be negative"}
"""Numeric keys that a negative number is legal for, and why."""


def _numeric_keys(node=Config, prefix=""):
    """(key, kinds of number it takes) of every numeric key."""
    for name, kind in get_type_hints(node).items():
        if dataclasses.is_dataclass(kind):
            yield from _numeric_keys(kind, f"{prefix}{name}.")
        elif {int, float} & {kind, *get_args(kind)}:
            yield prefix + name, kind


@pytest.mark.parametrize(
    ("key", "kind"), list(_numeric_keys()), ids=lambda value: value if isinstance(value, str) else ""
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, True])
def test_a_number_is_finite_and_in_its_range_in_every_group(key, kind, value):
    if value == -1 and value is not True and key in NO_BOUND:
        return
    config = Config()
    *parents, name = key.split(".")
    node = functools.reduce(getattr, parents, config)
    assert getattr(node, name) is None or not isinstance(getattr(node, name), bool)
    setattr(node, name, [value, 0.9] if kind == list[float] else value)
    with pytest.raises(ValueError, match=rf"^{re.escape(key)}=.*: expected "):
        getattr(config, parents[0]).validate()


def test_every_numeric_key_is_among_those_checked():
    numeric = dict(_numeric_keys())
    assert {"cluster.stage_timeout_s", "training.betas", "parallel.score.etp", "queue.max_bytes"} < numeric.keys()
    assert NO_BOUND.keys() < numeric.keys() and len(numeric) > 50


def _undocumented(node, prefix=""):
    """Keys whose field is not followed by a text."""
    sources = [inspect.getsource(one) for one in node.__mro__ if dataclasses.is_dataclass(one)]
    bodies = [ast.parse(textwrap.dedent(source)).body[0].body for source in sources]
    hints = get_type_hints(node)
    for statement, following in (pair for body in bodies for pair in zip(body, [*body[1:], None], strict=True)):
        if isinstance(statement, ast.AnnAssign):
            name = statement.target.id
            text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if dataclasses.is_dataclass(hints[name]):
                yield from _undocumented(hints[name], f"{prefix}{name}.")
            elif not (text and isinstance(following.value.value, str)):
                yield prefix + name


def test_there_are_fewer_than_190_keys_and_each_is_documented():
    keys = known_keys()
    assert len(keys) == len(set(keys)) < 190
    assert list(_undocumented(Config)) == []


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("rollout.temprature=1", "unknown key 'rollout.temprature'; did you mean 'rollout.sampling.temperature'?"),
        ("rollout.chunk=1", "unknown key 'rollout.chunk'; did you mean 'rollout.schedule.chunk_tokens'?"),
        ("training.learning_rate=1", "unknown key 'training.learning_rate'"),
        ("algoritm=grpo", "unknown key 'algoritm'; did you mean 'algorithm'?"),
        ("+cluster.cards=4", "unknown key 'cluster.cards'"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_right_one(argument, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        check_overrides([argument], ["algorithm", "cluster"])


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_a_choice_file_that_is_valid(name):
    register()
    with initialize_config_dir(str(ROOT / "recipes" / "conf"), version_base=None):
        found = OmegaConf.to_object(compose("config", [f"algorithm={name}"]))
    assert isinstance(found, Config) and found.algorithm.name == name
    found.algorithm.validate()


def test_known_keys_pass():
    check_overrides(
        ["rollout.sampling.temperature=0.5", "cluster=four", "hydra.verbose=true", "--cfg", "job"], ["cluster"]
    )


def _train(*arguments):
    command = [sys.executable, "scripts/train.py", *arguments]
    return machine.run(command, timeout_s=120, cwd=ROOT)


def test_cfg_job_prints_the_resolvedjob_of(checkpoint):
    shown = _train("--cfg", "job", f"model.path={checkpoint}", "cluster=four", "parallel=tp2ep2_ep4", "device=emulated")
    assert shown.returncode == 0, shown.stderr
    for line in ("npus: 4", "kind: emulated", "tp: 2", "group_size: 8", f"path: {checkpoint}"):
        assert line in shown.stdout


def test_the_command_line_refuses_in_one_line(checkpoint):
    refused = _train(f"model.path={checkpoint}", "rollout.temprature=1")
    assert refused.returncode == 2
    usage, error = refused.stderr.strip().splitlines()
    assert usage.startswith("usage: python scripts/train.py")
    assert error == "error: unknown key 'rollout.temprature'; did you mean 'rollout.sampling.temperature'?"
    refused = _train(f"model.path={checkpoint}", "data=addition", "cluster.npus=3", "parallel.train.tp=2")
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "train: tp=2 does not divide the 3 ranks of the layout: expected one of 1, 3 (cluster.npu" in refused.stderr


@pytest.mark.parametrize("loggers", [None, 3, "wandb", [1], [["a"]]])
def test_loggers_that_are_no_list_of_names_are_refused_by_key(loggers):
    config = Config()
    config.run.loggers = loggers
    with pytest.raises(ValueError, match="^run.loggers=.*: expected a list of names"):
        config.run.validate()
