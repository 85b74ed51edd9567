"""What `rlfusion check` prints, warns of and refuses, in this process: it starts neither Ray nor a card."""

import json
import logging
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.resources import RECIPES
from scripts import check as script
from stalesync.check import BAR, BINS, check, collecting_warnings, histogram
from stalesync.job.overrides import composed
from stalesync.prompts import make_tokenizer
from tests.helpers import tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_checkpoint(folder, experts=False)
    make_tokenizer(folder)
    return folder


@pytest.fixture
def overrides(model, tmp_path):
    """Arguments of a job over rows with the given answers."""

    def of(*answers, **changes):
        (file := tmp_path / "rows.jsonl").write_text(
            "".join(json.dumps({"q": "1" * (1 + row % 9), "a": answer}) + "\n" for row, answer in enumerate(answers))
        )
        fields = {"data.source": file, "data.prompt_field": "q", "data.answer_field": "a", "run.eval_prompts": 0}
        fields |= {"model.path": model, "device": "emulated", "reward": "math", "reward.workers": 1}
        fields |= {"data.prompts_per_step": 4, "algorithm.group_size": 2, "rollout.max_response_length": 10}
        return [f"{key}={value}" for key, value in (fields | changes).items()]

    return of


def run(capsys, monkeypatch, arguments):
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
    status = 0
    try:
        script.main()
    except SystemExit as end:
        status = end.code
    return status, capsys.readouterr()


def test_a_job_is_described_without_starting_ray(overrides, capsys, monkeypatch):
    monkeypatch.setattr("ray.init", lambda *_, **__: pytest.fail("Ray was started"))
    changes = {"data.max_prompt_length": 8, "data.long_prompts": "skip", "fusion.resident": "one", "run.steps": 3}
    arguments = overrides("\\boxed{7}", *"12345678", **changes)
    status, told = run(capsys, monkeypatch, arguments)
    assert status == 0 and told.out.endswith("the job can start; 0 warnings\n")
    for text in (
        "fusion.resident=one has no effect with fusion.deployment=colocated, only with fusion.deployment=full",
        "32 tokens; prompts as they are",
        "a prompt ends with '1'",
        "a response ends with <eos>",
        "8 rows an epoch; 1 dropped: longer than data.max_prompt_length=8",
        "3 steps, 1.5 epochs",
        "1-1 tokens " + "#" * BAR + " 1\n",
        "math of '\\\\boxed{7}', where the answer is '\\\\boxed{7}': 1 in ",
        "K of 2.00G of the emulated card",
        "estimated for bfloat16 weights; with model.dtype=float32 a card takes up to twice as much",
        "4 prompts x 2 responses = 8 samples; at most 116 tokens",
        "samples are at most 0 versions old, correction none",
    ):
        assert text in told.out


def test_warnings_come_last_and_do_not_refuse(overrides, capsys, monkeypatch):
    arguments = overrides("1", "\\boxed{}", "Paris", "4", **{"device.capacity_bytes": "1M"})
    status, told = run(capsys, monkeypatch, arguments)
    warnings = [line for line in told.out.splitlines() if line.startswith("warning: ")]
    assert status == 0 and told.out.endswith(f"the job can start; {len(warnings)} warnings\n")
    for text in ("can never match 1 of 4 reference answers", "compares 1 of 4 reference answers as text", "memory: "):
        assert any(text in line for line in warnings)


@pytest.mark.parametrize(
    ("answers", "changes", "message"),
    [
        (["\\boxed{}"], {}, "the reward math can never match 1 of 1 reference answers"),
        (["1"], {"algorithm.group_size": "0"}, "algorithm.group_size=0"),
        (["1"], {"data.system_prompt": "x"}, "data.system_prompt needs a tokenizer with a chat template"),
        (["1"], {"no.such": "1"}, "unknown key 'no.such'"),
        (
            ["1"],
            {"device.capacity_bytes": "1M", "model.dtype": "bfloat16"},
            "fusion.offload=switch training.token_budget=",
        ),
        (["1"], {"algorithm": "ppo"}, "algorithm=ppo: expected one of dapo, "),
    ],
)
def test_what_a_run_would_refuse_is_refused_with_status_2(overrides, capsys, monkeypatch, answers, changes, message):
    status, told = run(capsys, monkeypatch, overrides(*answers, **changes))
    assert status == 2 and message in told.err and "can start" not in told.out


def test_the_reward_is_called_once_and_its_failure_is_a_warning(overrides, tmp_path, capsys):
    (file := tmp_path / "own.py").write_text(
        "def score(prompt, response, answer):\n"
        "    open(__file__ + '.calls', 'a').write('x')\n"
        "    raise KeyError('no judge')\n"
    )
    arguments = [one for one in overrides("1", "2") if not one.startswith("reward=")]
    warnings = check(composed(RECIPES / "conf", [*arguments, f"reward.path={file}:score"]))
    assert "custom of '1', where the answer is '1': failed (raised)" in capsys.readouterr().out
    assert any("no judge" in line for line in warnings)
    assert (tmp_path / "own.py.calls").read_text() == "x"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ("reward.terms=[{{reward: {own}}}]", "reward.terms[0] (score): reward.path="),
        ("eval.files=[{{path: {rows}, name: own, reward: {own}}}]", "eval.files: 'own': reward.path="),
    ],
)
def test_a_term_and_the_reward_of_a_file_are_called_too(overrides, tmp_path, changes, key):
    (file := tmp_path / "own.py").write_text("def score(prompt, response, answer):\n    return 'good'\n")
    change = changes.format(own=f"'{file}:score'", rows=tmp_path / "rows.jsonl")
    config = composed(RECIPES / "conf", [*overrides("1", "2"), change])
    with pytest.raises(ValueError, match=re.escape(key) + ".*it returned 'good' \\(str\\); expected a finite number"):
        check(config)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=50))
def test_a_histogram_counts_every_prompt_in_a_range_that_holds_it(lengths):
    lines = histogram(lengths)
    assert len(lines) <= BINS and sum(int(line.split()[-1]) for line in lines) == len(lengths)
    for line in lines:
        low, high = map(int, line.split()[0].split("-"))
        count = sum(low <= length <= high for length in lengths)
        assert count == int(line.split()[-1]) and line.count("#") <= BAR and bool(count) == ("#" in line)


def test_collected_warnings_are_not_printed_and_handlers_return(capsys):
    before = logging.getLogger().handlers
    with collecting_warnings() as found:
        logging.getLogger("x").warning("%s", "one")
        logging.getLogger("x").info("no")
    assert found == ["one"] and logging.getLogger().handlers is before and not capsys.readouterr().err


def test_a_file_of_which_nothing_is_held_out_is_warned_of(overrides, capsys, monkeypatch):
    few = {"run.eval_prompts": 64, "reward": "arithmetic"}
    status, told = run(capsys, monkeypatch, overrides(*"12345", **few))
    assert status == 0 and re.search("warning: run.eval_prompts=64: no row of .*rows.jsonl is held out", told.out)
    few["eval.best"] = "val-core/held_out/reward/mean@1"
    status, told = run(capsys, monkeypatch, overrides(*"12345", **few))
    assert status == 2 and "eval.best='val-core/held_out/reward/mean@1': expected null, as nothing is" in told.err
