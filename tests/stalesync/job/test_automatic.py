"""Keys that are `auto`: what they become, and that a resume keeps it."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference.config import AUTO, DRAFTS
from fusion.resources import RECIPES
from stalesync.job import automatic
from stalesync.job.automatic import AUTOMATIC, LONG, describe, resolve
from stalesync.job.config import Config, RunConfig
from stalesync.job.keys import value_of
from stalesync.job.overrides import composed
from stalesync.job.resume import kept_automatic
from tests.helpers import tiny_checkpoint
from tests.stalesync.job.jobs import job_of

OFF = {"rollout.schedule.chunk_tokens": None, "rollout.drafts.source": "none"}


def values(config):
    return {key: value_of(config, key) for key in AUTOMATIC}


@given(
    chunk_tokens=st.sampled_from([AUTO, None, 1, 4096]),
    source=st.sampled_from([AUTO, *DRAFTS]),
    batch_invariant=st.booleans(),
    max_staleness=st.integers(0, 2),
    max_response_length=st.integers(1, 4 * LONG),
    can_build=st.booleans(),
    kept=st.sampled_from([{}, OFF, dict(zip(AUTOMATIC, (77, "both"), strict=True))]),
)
def test_invariants(chunk_tokens, source, batch_invariant, max_staleness, max_response_length, can_build, kept):
    stated = job_of(
        "",
        rollout__schedule__chunk_tokens=chunk_tokens,
        rollout__drafts__source=source,
        rollout__engine__batch_invariant=batch_invariant,
        stalesync__max_staleness=max_staleness,
        rollout__max_response_length=max_response_length,
    )
    before, found = values(stated), resolve(stated, can_build=can_build, kept=kept)
    chunks, drafts = values(found).values()
    assert values(stated) == before and AUTO not in (chunks, drafts)
    assert resolve(found, can_build=can_build, kept={}) == found
    may = (batch_invariant or max_staleness > 0) and max_response_length >= LONG
    by_rule = max_response_length // 8 if may else None, "both" if may else "none"
    expected = {key: kept.get(key, value) for key, value in zip(AUTOMATIC, by_rule, strict=True)}
    assert chunks == (expected[AUTOMATIC[0]] if chunk_tokens == AUTO else chunk_tokens)
    assert drafts == (source if source != AUTO else expected[AUTOMATIC[1]] if can_build else "none")
    assert (describe(stated, found) == "") == (AUTO not in (chunk_tokens, source))


def test_the_defaults_of_a_short_synchronous_job_are_off():
    config = Config()
    assert values(config.resolved()) == OFF
    stated = config.rollout
    assert stated.max_chunk_tokens == 0 and not stated.drafts.is_on, "as is what nobody has resolved"
    line = "resolved from auto: rollout.schedule.chunk_tokens=null rollout.drafts.source=none"
    assert describe(config, config.resolved()) == line


def test_a_resume_keeps_what_its_run_has_resolved(tmp_path, monkeypatch):
    from omegaconf import OmegaConf

    monkeypatch.setattr("stalesync.job.resume.complete_checkpoints", lambda path: ["step 1"])
    resumed = RunConfig(dir=str(tmp_path), name="one", resume="true")
    assert kept_automatic(resumed) == {}, "its settings cannot be read"
    (tmp_path / "one").mkdir()
    OmegaConf.save(OmegaConf.structured(Config().resolved()), tmp_path / "one" / "config.yaml")
    assert kept_automatic(resumed) == OFF and kept_automatic(dataclasses.replace(resumed, resume="false")) == {}
    ahead = job_of("", stalesync__max_staleness=1, rollout__max_response_length=LONG)
    assert values(ahead.resolved()) == {AUTOMATIC[0]: LONG // 8, AUTOMATIC[1]: "both"}
    assert values(ahead.resolved(kept_automatic(resumed))) == OFF
    assert automatic.pays(ahead)


SYSTEMS = {
    "sync": ("separate", 0, "fifo", None, "none"),
    "rlfusion": ("hybrid", 1, "history", None, "none"),
    "seer": ("colocated", 0, "context", 2048, "siblings"),
    "rhyme": ("colocated", 1, "histopipe", 512, "history"),
    "all": ("hybrid", 1, "history", 512, "both"),
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_is_what_its_article_describes_and_what_is_stated_beside_it_applies(system, tmp_path):
    model = tiny_checkpoint(tmp_path, max_position_embeddings=8192)
    stated = [f"system={system}", "rollout.max_response_length=4096", "cluster.npus=4", f"model.path={model}"]
    stated += ["data.source=addition"]
    config = composed(RECIPES / "conf", stated)
    config.validate()
    found, rollout = config.resolved(), config.resolved().rollout
    chosen = rollout.schedule.order, rollout.schedule.chunk_tokens, rollout.drafts.source
    assert (found.fusion.deployment, found.stalesync.max_staleness, *chosen) == SYSTEMS[system]
    other = composed(RECIPES / "conf", [*stated, "fusion=full", "rollout.schedule.order=fifo"])
    assert (other.fusion.deployment, other.rollout.schedule.order) == ("full", "fifo")


def test_a_saved_config_takes_no_system():
    with pytest.raises(ValueError, match=r"system=all: expected KEY=VALUE"):
        composed(RECIPES / "conf", ["system=all"], saved=Config())
