"""Acceptance of drafts by replaying responses through the drafter of a run."""

from __future__ import annotations

import json
import random
from pathlib import Path
from string import ascii_lowercase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.rollout.drafts.texts import TextSpec
from stalesync.simulator.command_line import answer
from stalesync.simulator.draft_texts import TRACKS, KeptTokens, measured, read_texts, replay, whole_drafter
from stalesync.simulator.drafts import MAX_DRAFTED

JOB = """model=olmoe_7b cluster.hardware=ascend_910c cluster.npus=8 run.steps=4 data.prompts_per_step=8
data.max_prompt_length=64 rollout.max_response_length=512 rollout.sampling.forced_median=128""".split()
TEXTS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=60), min_size=1, max_size=8)


def replayed(texts, *, siblings=True, history=()):
    kept = KeptTokens()
    spec = TextSpec(siblings, bool(history))
    drafter = whole_drafter(spec)
    if history:
        replay(drafter, "0-0", 0, history, KeptTokens())
    replay(drafter, "1-0", 0, texts, kept)
    return kept


@settings(max_examples=40, deadline=None)
@given(TEXTS)
def test_every_token_is_kept_once_and_a_pass_keeps_at_least_one(texts):
    kept = replayed(texts)
    assert sum(map(sum, kept.reached.values())) == sum(map(len, texts))
    for track, means in kept.by_drafted().items():
        assert means[0] == 1 and means == sorted(means) and means[-1] <= 1 + MAX_DRAFTED
        assert kept.passes[track] == kept.reached[track][0]


def test_what_siblings_or_the_last_epoch_said_is_drafted_and_nothing_else():
    text, other = list(range(100)), list(range(500, 600))
    alone = replayed([text], siblings=True).by_drafted()
    assert alone[0][-1] == 1, "a response of new tokens has nothing to draft from"
    again = replayed([text], siblings=False, history=[text]).by_drafted()
    assert again[0][-1] > 5 and replayed([text], siblings=False, history=[other]).by_drafted()[0][-1] == 1
    finished = replayed([text[:20], text], siblings=True).by_drafted()
    assert set(finished) <= {*TRACKS} and finished[0][-1] < 1.5


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_both_forms_of_texts_are_read(tmp_path):
    several = write(tmp_path / "a", [{"prompt": "p", "samples": ["x", "y"]}, {"question": "q", "samples": ["z"]}])
    single = write(tmp_path / "b", [{"prompt": "p", "response": text, "step": 1} for text in ("x", "y")])
    assert read_texts(several) == read_texts(single) == [["x", "y"]]
    for wrong in ([{"prompt": "p"}], [{"samples": ["x", "y"]}], [["x"]], [{"prompt": "p", "samples": 3}]):
        with pytest.raises(ValueError, match=r"texts=.*: expected JSON Lines"):
            read_texts(write(tmp_path / "c", wrong))
    with pytest.raises(ValueError, match="no prompt has two responses"):
        read_texts(write(tmp_path / "c", [{"prompt": "p", "response": "x"}]))


def test_simulate_takes_drafts_of_texts_and_states_what_acceptance_rests_on(tmp_path, capsys):
    words, draw = [f"word{n}" for n in range(120)], random.Random(0)
    unlike_texts = ["".join(draw.choices(ascii_lowercase[3 * n : 3 * n + 3], k=60)) for n in range(8)]
    texts = {
        "alike": write(tmp_path / "alike", [{"prompt": "p", "samples": [" ".join(words)] * 8}]),
        "unlike": write(tmp_path / "unlike", [{"prompt": "p", "samples": unlike_texts}]),
    }

    def step_s(*arguments):
        answer([*JOB, *arguments, "--json", str(tmp_path / "out.json")], Path("recipes"))
        found = json.loads((tmp_path / "out.json").read_text())
        assert any(note.startswith("drafts: acceptance ") for note in found["notes"]) == bool(arguments)
        return found["rows"][0]["step_s"]

    published, plain = step_s("rollout.drafts.source=both"), step_s()
    assert "acceptance is an input, as published" in " ".join(capsys.readouterr().out.split())
    alike, unlike = (step_s("rollout.drafts.source=history", f"texts={path}") for path in texts.values())
    assert "measured on texts, tokens a step of whole drafts" in " ".join(capsys.readouterr().out.split())
    assert published < plain and alike < unlike
    assert unlike == pytest.approx(plain, rel=0.05), "nothing is drafted that does not pay"


def test_the_spec_has_the_sources_of_the_config(tmp_path):
    path = write(tmp_path / "t", [{"prompt": "p", "samples": ["a b c d e f"] * 4}])
    spec = measured(path, siblings=False, history=True)
    assert (spec.siblings, spec.history) == (False, True) and spec.kept is not None
    assert spec.track(0) == 0 and spec.tokens_per_step(0, MAX_DRAFTED) > 1
