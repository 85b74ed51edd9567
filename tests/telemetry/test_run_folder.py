import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fusion.telemetry import RunFolder, Span, read_timeline
from fusion.telemetry.files import open_temporary, read_jsonl
from fusion.telemetry.run_contents import describe

ENDLESS = """
import sys
from fusion.telemetry import RunFolder, Span
run = RunFolder(sys.argv[1], "killed")
run.write_config({"seed": 1})
step = 0
while True:
    step += 1
    run.log(step, {"critic/rewards/mean": step / 100, "timing_s/gen": 0.1})
    run.log_samples(step, [{"prompt": "1+1=", "response": "2" * 5000, "reward": 1.0}] * 4)
    run.log_spans([Span("card 0", "decode", "gen", step * 1000, step * 1000 + 500)] * 50)
    print(step, flush=True)
"""


def metrics(run: RunFolder) -> list[dict]:
    return read_jsonl(run.path / "metrics.jsonl")


def samples(run: RunFolder) -> list[dict]:
    return read_jsonl(run.path / "samples.jsonl")


def kill_midway(root: Path) -> Path:
    child = subprocess.Popen([sys.executable, "-c", ENDLESS, str(root)], stdout=subprocess.PIPE, cwd=os.getcwd())
    try:
        while int(child.stdout.readline()) < 20:
            pass
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    return root / "killed"


def test_a_killed_run_leaves_every_file_readable(tmp_path):
    folder = kill_midway(tmp_path)
    rows = read_jsonl(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and len(rows) >= 20
    assert len(read_jsonl(folder / "samples.jsonl")) >= 4 * 20
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"seed": 1}
    assert len(read_timeline(folder / "timeline.json")) >= 50 * 20
    assert len(scalars(folder / "tensorboard")["critic/rewards/mean"]) >= 20


def test_a_resumed_run_removes_the_temporary_files_of_the_killed_one(tmp_path):
    """Killed between the two halves of `write_atomic`."""
    folder = RunFolder(tmp_path, "run")
    folder.close()
    temporary, handle = open_temporary(folder.path / "config.yaml")
    os.close(handle)
    kept = [folder.path / name for name in (".notes", "notes.0123456789abcdef", ".cache.0123456789abcde")]
    for path in kept:
        path.touch()
    RunFolder(tmp_path, "run", "resume").close()
    assert not temporary.exists() and all(path.exists() for path in kept)


def test_a_killed_run_is_resumed_from_its_checkpoint_step(tmp_path):
    folder = kill_midway(tmp_path)
    (folder / "metrics.jsonl").open("a").write('{"step": 999, "critic/rew')
    spans = len(read_timeline(folder / "timeline.json"))
    time.sleep(0.002)  # event files are named by the millisecond
    with RunFolder(tmp_path, "killed", if_exists="resume") as run:
        assert run.resumed and run.path == folder
        assert run.rewind(10) >= 10
        for step in (11, 12):
            run.log(step, {"critic/rewards/mean": 1.0})
            run.log_samples(step, [{"prompt": "p", "response": "r", "reward": 1.0}])
        run.log_spans([Span("card 0", "train", "train", 0, 5)])
        assert [row["step"] for row in metrics(run)] == list(range(1, 13))
        assert max(sample["step"] for sample in samples(run)) == 12
    assert len(read_timeline(folder / "timeline.json")) == spans + 1
    curve = scalars(folder / "tensorboard")["critic/rewards/mean"]
    assert [step for step, _ in curve] == list(range(1, 13))
    assert [value for _, value in curve][9:] == pytest.approx([0.1, 1.0, 1.0])


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def test_tensorboard_holds_what_metrics_jsonl_holds(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        for step in range(1, 4):
            run.log(step, {"actor/lr": 0.5 * step, "perf/throughput": 100.0})
        assert scalars(run.path / "tensorboard") == {
            "actor/lr": [(row["step"], row["actor/lr"]) for row in metrics(run)],
            "perf/throughput": [(row["step"], row["perf/throughput"]) for row in metrics(run)],
        }


def test_evaluations_are_kept_to_the_step_of_a_resume_and_the_first_is_step_0_of_tensorboard(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        run.log_evaluation(0, [{"step": 0, "file": "a"}, {"step": 0, "file": "b"}], {"val-core/a/reward/mean@1": 0.25})
        for step in (1, 2):
            run.log_evaluation(step, [{"step": step, "file": "a"}], {})
            run.log(step, {"val-core/a/reward/mean@1": 0.5})
        run.write_best({"step": 2})
        assert json.loads((run.path / "best.json").read_text()) == {"step": 2}
        assert [line.split()[0] for line in describe(run.path)[3:]] == ["evaluations.jsonl", "best.json"]
    assert [step for step, _ in scalars(run.path / "tensorboard")["val-core/a/reward/mean@1"]] == [0, 1, 2]
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.rewind(1)
        run.write_best(None)
        assert [(row["step"], row["file"]) for row in run.evaluations()] == [(0, "a"), (0, "b"), (1, "a")]
        assert not (run.path / "best.json").exists()
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.rewind(0)
        assert [row["step"] for row in run.evaluations()] == [0, 0]


def test_a_name_that_exists(tmp_path):
    first, second, third = (RunFolder(tmp_path, "run") for _ in range(3))
    assert [folder.name for folder in (first, second, third)] == ["run", "run-2", "run-3"]
    assert first.choice == f"new run folder {tmp_path / 'run'}"
    assert third.choice == f"{tmp_path / 'run'} exists, so this run writes to {tmp_path / 'run-3'}"
    first.close()
    assert RunFolder(tmp_path, "run", if_exists="resume").choice == f"resuming in {tmp_path / 'run'}"


def test_a_folder_that_cannot_be_written_is_refused_by_its_key(tmp_path):
    (tmp_path / "file").touch()
    for root in (Path("/proc/no"), tmp_path / "file"):
        with pytest.raises(ValueError, match=f"run.dir={root}: cannot be written: .*{root}"):
            RunFolder(root, "run")


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "a/"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="expected one folder name"):
        RunFolder(tmp_path, name)


def test_numbers_json_has_not_are_named(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        run.log(1, {"actor/pg_loss": math.nan, "actor/lr": 0.1})
        run.log_samples(1, [{"prompt": "p", "response": "r", "reward": math.inf}])
    [line] = (run.path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {"step": 1, "actor/pg_loss": None, "actor/lr": 0.1, "not_finite": {"actor/pg_loss": "nan"}}
    assert samples(run)[0]["not_finite"] == {"reward": "inf"}


def test_a_torn_line_is_cut_off_before_more_is_written(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    with RunFolder(tmp_path, "run") as run:
        run.log(1, {"a": 1.0})
        path.open("a").write('{"step": 2, "a"')
        assert [row["step"] for row in metrics(run)] == [1]
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.log(2, {"a": 2.0})
        assert [row["step"] for row in metrics(run)] == [1, 2]


def test_a_resumed_run_completes_the_row_of_the_step_that_it_begins_after(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        for step in (1, 2, 3):
            run.log(step, {"a": float(step), "b": math.inf, "c": math.nan})
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.rewind(2)
        run.complete(2, {"val-core/a/reward/mean@1": 0.5, "c": math.nan})
        run.repeat({})
        run.log(3, {"a": 30.0})
    last = metrics(run)[1]
    assert last == {
        "step": 2,
        "a": 2.0,
        "b": None,
        "c": None,
        "val-core/a/reward/mean@1": 0.5,
        "not_finite": {"b": "inf", "c": "nan"},
    }
    assert [row["step"] for row in metrics(run)] == [1, 2, 3]
    curves = scalars(run.path / "tensorboard")
    assert curves["a"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert curves["val-core/a/reward/mean@1"] == [(2, 0.5)]


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 2
    path.write_bytes(data)


def test_damage_beside_a_checkpoint_is_named_and_dropped_and_blocks_no_resume(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        for step in (1, 2, 3):
            run.log(step, {"a": float(step)})
            run.log_samples(step, [{"prompt": "p", "response": "r", "reward": 1.0}])
            run.log_groups(step, [f"g{step}"], "trained", 0)
            run.log_evaluation(step, [{"step": step, "file": "f", "value": 0.25}], {})
        run.log_spans([Span("card 0", "train", "train", 0, 5)])
        seals = run.seal(run.log_bytes())
        run.log(4, {"a": 4.0})
    text = (run.path / "evaluations.jsonl").read_bytes()
    flip(run.path / "evaluations.jsonl", text.index(b"0.25") + 2)  # it still parses: 0.05
    flip(run.path / "metrics.jsonl", 0)  # it does not
    flip(run.path / "groups.jsonl", -1)
    (run.path / "samples.jsonl").unlink()
    flip(run.path / "timeline.json", (run.path / "timeline.json").read_bytes().index(b"traceEvents"))
    (run.path / "config.yaml").write_bytes(b"\xff")
    sealed = {}
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.write_config({"a": 1})
        assert run.rewind(3, seals, sealed.update) == 1
        run.log_spans([Span("card 0", "train", "train", 0, 5)])
        assert [row["step"] for row in metrics(run)] == [row["step"] for row in run.evaluations()] == [2, 3]
        named = [line.split(";")[0] for line in run.notes]
        damaged = "damaged rows were dropped"
        assert named[:4] == [
            f"evaluations.jsonl: {damaged} (1)",
            f"groups.jsonl: {damaged} (1-3)",
            "samples.jsonl is missing: it had 3 rows",
            f"metrics.jsonl: {damaged} (1)",
        ]
        assert "timeline.json: expected a timeline" in named[4] and len(read_timeline(run.path / "timeline.json")) == 1
        assert run.seal(run.log_bytes())["metrics.jsonl"].blocks[-1].rows == 2
    kept = sorted(path.name for path in run.path.iterdir())
    with RunFolder(tmp_path, "run", if_exists="resume") as run:  # before it has another checkpoint
        run.rewind(3, sealed)
        assert run.damage == [] and sorted(path.name for path in run.path.iterdir()) == kept


@pytest.mark.parametrize("killed", [False, True])
def test_a_row_is_completed_after_the_manifest_has_it(tmp_path, killed):
    """Killed between the two: the next start finds no damage."""
    sealed = {}

    def seal(seals):
        sealed.update(seals)
        if killed:
            raise KeyboardInterrupt

    with RunFolder(tmp_path, "run") as run:
        for step in (1, 2):
            run.log(step, {"a": float(step)})
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        with pytest.raises(KeyboardInterrupt) if killed else nullcontext():
            run.complete(2, {"b": 1.0}, seal)
        now = run.seal(run.log_bytes())
        assert killed or all(now[name].blocks == seal.blocks for name, seal in sealed.items())
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        assert run.rewind(2, sealed) == 0 and not run.damage
        assert [row.get("b") for row in metrics(run)] == [None, None if killed else 1.0]


def test_a_resumed_run_sends_its_last_rows_to_its_loggers_again_and_no_more(tmp_path, monkeypatch):
    with RunFolder(tmp_path, "run") as run:
        run.log_evaluation(0, [{"step": 0}], {"val": 0.25})
        for step in (1, 2, 3, 4):
            run.log(step, {"a": float(step), "b": math.nan})
    for folder in (tmp_path / "run" / "tensorboard").iterdir():
        folder.write_bytes(b"")  # as of a logger that had stored nothing yet
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        run.rewind(3)
        run.repeat({"val": 0.25})
        run.log(4, {"a": 40.0})
    curves = scalars(run.path / "tensorboard")
    assert curves["a"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)] and curves["val"] == [(0, 0.25)]
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    monkeypatch.setattr("fusion.telemetry.run_folder.REPEATED_BYTES", 1)
    with RunFolder(tmp_path, "run", if_exists="resume") as run:
        sent = []
        monkeypatch.setattr(run, "_opened_loggers", lambda: SimpleNamespace(log=lambda *row: sent.append(row)))
        run.repeat({"val": 0.25})
    assert sent == [(4, {"a": 40.0})]


def test_damage_in_the_middle_is_not_passed_over(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_jsonl(tmp_path / "m.jsonl")


@dataclass
class Config:
    layers: tuple[int, ...] = (1, 2)
    path: Path = Path("a")


def test_config_of_every_start_is_kept(tmp_path):
    run = RunFolder(tmp_path, "run")
    run.write_config(Config())
    assert yaml.safe_load((run.path / "config.yaml").read_text()) == {"layers": [1, 2], "path": "a"}
    run.write_config("seed: 2\n")
    run.write_config("seed: 2\n")
    assert (run.path / "config.yaml").read_text() == "seed: 2\n"
    run.write_config("seed: 3\n", keep=False)
    assert (run.path / "config.yaml").read_text() == "seed: 3\n"
    assert [path.name for path in run.path.glob("config.start-*")] == ["config.start-1.yaml"]


def test_samples_are_spaced_over_the_step(tmp_path):
    with RunFolder(tmp_path, "run", samples_per_step=2) as run:
        run.log_samples(1, [{"prompt": str(index), "response": "", "reward": 0.0} for index in range(10)])
        assert [sample["prompt"] for sample in samples(run)] == ["0", "5"]


def test_texts_of_samples_are_abridged_and_the_row_says_so(tmp_path):
    long = "a" * 400_000
    row = {"prompt": "p", "response": long, "reward": 0.5, "messages": [{"role": "tool", "content": long}]}
    with RunFolder(tmp_path, "run") as run:
        run.log_samples(1, [row])
        run.sample_characters = 1000
        run.log_samples(2, [row, {"prompt": "p", "response": "r", "reward": 0.5}])
        whole, short, other = samples(run)
    assert whole == {"step": 1, **row}
    assert short["abridged"] == 1000 and "399,000 characters left out" in short["response"]
    assert short["messages"] == [{"role": "tool", "content": short["response"]}] and "abridged" not in other


def test_describe_names_only_what_is_there(tmp_path):
    with RunFolder(tmp_path, "run") as run:
        assert describe(run.path) == [f"{run.path}/"]
        run.log(1, {"a": 1.0})
        for step in (9, 10, 100, 2):
            (run.checkpoints / f"step-{step}").mkdir()
            (run.checkpoints / f"step-{step}" / "manifest.json").touch()
        (run.checkpoints / "step-101").mkdir()
        (run.checkpoints / "step-4-good").mkdir()
        (run.checkpoints / "step-4-good" / "manifest.json").touch()
        (run.hf / "config.json").write_text("{}")
        lines = describe(run.path)
    assert [line.split()[0] for line in lines[1:]] == ["metrics.jsonl", "tensorboard/", "checkpoints/", "hf/"]
    assert "4 kept: step-9, step-10, step-100" in lines[3], "by number, without the one that is not complete"


def test_a_command_of_the_report_can_be_pasted_whatever_the_folder_is_called(tmp_path):
    with RunFolder(tmp_path / "my runs", "run") as run:
        (run.path / "tensorboard").mkdir(exist_ok=True)
        (run.path / "tensorboard" / "events").touch()
        (line,) = [line for line in describe(run.path) if "--logdir" in line]
        assert shlex.split(line)[1:] == ["tensorboard", "--logdir", str(run.path / "tensorboard")]
