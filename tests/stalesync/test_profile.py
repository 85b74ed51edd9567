"""A run writes profiler traces of the steps in `run.profile_steps`, one for each card."""

import json

import pytest
import torch

from fusion.colocate.stages import StageLog
from fusion.npu import open_device
from fusion.telemetry.page import read_run
from stalesync.job.config import RunConfig
from tests.stalesync.runs import FOUR, train
from tests.stalesync.test_stale_run import LONG, TWO

STAGES = {"switch to infer", "generate", "switch to train", "train", "forward_backward", "optimizer_step"}


def names_in(trace):
    """Names of the annotations of a trace, which must be JSON."""
    events = json.loads(trace.read_text())["traceEvents"]
    return {event["name"] for event in events if event.get("cat") == "user_annotation"}


@pytest.mark.extended
def test_a_run_profiles_the_steps_that_it_is_asked_for(base, tmp_path):
    done = train(base, tmp_path, *FOUR, "run.steps=3", "run.profile_steps=[2]", "run.eval_prompts=0")
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    traces = sorted((folder / "profile").iterdir())
    assert [trace.name for trace in traces] == [f"step-2-card-{rank}.json" for rank in range(4)]
    for trace in traces:
        assert names_in(trace) >= STAGES
        assert '"aten::mm"' in trace.read_text()
        events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "train"]
        assert len(events) == 1, "one step, and no other"
    assert "profile/" in done.stdout and "4 profiler traces: step-2-card-0.json" in done.stdout
    assert read_run(folder)["profiles"] == [f"profile/{trace.name}" for trace in traces]
    assert "profile/step-2-card-3.json" in (folder / "report.html").read_text()


@pytest.mark.extended
@pytest.mark.parametrize("bound", [0, 1])
def test_cards_that_only_generate_are_profiled_too_also_where_they_never_stop(base, tmp_path, bound):
    stale = [*LONG, f"stalesync.max_staleness={bound}"] if bound else []
    steps = 5 if bound else 3  # a stale run has generated the samples of its last step before that
    options = [f"run.steps={steps}", "run.profile_steps=[2,3]", "run.eval_prompts=0", "fusion=separate", *TWO, *stale]
    done = train(base, tmp_path, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    traces = {trace.name: trace for trace in (tmp_path / "run" / "profile").iterdir()}
    assert sorted(traces) == [f"step-{step}-card-{rank}.json" for step in (2, 3) for rank in (0, 1)]
    for name, trace in traces.items():
        assert '"aten::mm"' in trace.read_text(), name
    for step in (2, 3):
        trained, generated = (names_in(traces[f"step-{step}-card-{rank}.json"]) for rank in (0, 1))
        assert "optimizer_step" in trained and "optimizer_step" not in generated
        assert bound or "generate" in generated and "generate" not in trained


def test_a_profile_begins_and_ends_between_two_steps_of_a_stage_that_goes_on(tmp_path):
    log = StageLog(1, open_device("emulated"))

    def step(name):
        with torch.profiler.record_function(name):
            pass

    with log.stage("generate", "gen"), log.timeline.strip() as mark:
        step("before")
        log.ask_profile(tmp_path / "step-2-card-1")
        mark("decode")
        step("inside")
        log.ask_profile(None)
        mark("decode")
        step("after")
        mark("decode")
        assert names_in(tmp_path / "step-2-card-1.json") == {"inside"} and log.timeline.after_mark is None
    log.ask_profile(tmp_path / "step-3-card-1")
    log.ask_profile(None)
    log.ask_profile(tmp_path / "step-4-card-1")
    with log.stage("generate", "gen"):
        pass
    log.end_profile()
    assert names_in(tmp_path / "step-4-card-1.json") == {"generate"}


@pytest.mark.parametrize("steps", [[0], [4], [2, 4], [True], [1.5]])
def test_steps_that_never_come_are_refused(steps):
    RunConfig(steps=3, profile_steps=[1, 3]).validate()
    with pytest.raises(ValueError, match=r"run.profile_steps=.*a list of whole numbers from 1 to run.steps=3"):
        RunConfig(steps=3, profile_steps=steps).validate()


def test_a_stage_that_fails_ends_and_writes_the_profile(tmp_path):
    log = StageLog(1, open_device("emulated"))
    log.begin_profile(tmp_path / "profile" / "step-5-card-1")
    with log.stage("generate", "gen"):
        pass
    with pytest.raises(ZeroDivisionError), log.stage("train", "train"):
        _ = 1 // 0
    trace = tmp_path / "profile" / "step-5-card-1.json"
    assert names_in(trace) == {"generate", "train"}
    written = trace.stat()
    with log.stage("switch", "switch"):
        pass
    log.end_profile()
    assert trace.stat() == written and log.timeline.annotate is None
    assert [span.name for span in log.timeline.drain()] == ["generate", "train", "switch"]
