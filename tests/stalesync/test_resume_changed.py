"""Whole runs that resume under other settings or with other files: refused before a card starts, or right."""

import json
import shutil

import pytest
import yaml

from fusion.telemetry.run_contents import complete_checkpoints
from stalesync.job import savepoint
from tests.stalesync.runs import rows_of, train

OPTIONS = ["stalesync.max_staleness=1", "run.eval_prompts=0", "run.save_every=1", "run.keep=0"]


@pytest.fixture(scope="module")
def stopped(base, tmp_path_factory):
    """A run whose newest checkpoint has groups in progress, and the model that it has begun with."""
    folder = tmp_path_factory.mktemp("stopped")
    shutil.copytree(base, folder / "model")
    done = train(folder / "model", folder, *OPTIONS, "run.steps=3", "device.operators=plain")
    assert done.returncode == 0, done.stdout + done.stderr
    for step in (2, 3):
        shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step}")
    state = savepoint.read(folder / "run" / "checkpoints" / "step-1")
    assert savepoint.groups_in_progress(state)
    return folder


@pytest.fixture
def copy(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "copy")
    return tmp_path / "copy"


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "lock.json")
    return {path: path.read_bytes() for path in files}


def resume(folder, *overrides):
    return train(folder / "model", folder, *OPTIONS, "run.steps=3", "run.resume=true", *overrides)


@pytest.mark.parametrize(
    "changed",
    [
        "algorithm.group_size=2",
        "algorithm.group_size=8",
        "stalesync.max_staleness=0",
        "data.prompts_per_step=4",
        "rollout.max_response_length=4",
        'rollout.sampling.stop=["1"]',
        "algorithm=dapo",
    ],
)
def test_with_groups_in_progress_a_change_that_they_cannot_bear_is_refused_by_key(copy, changed):
    before = contents(copy)
    done = resume(copy, changed)
    key = changed.partition("=")[0].replace("algorithm=", "algorithm.name=")
    assert done.returncode == 1 and "cannot resume" in done.stderr and key in done.stderr, done.stdout + done.stderr
    assert "start Ray" not in done.stdout and contents(copy) == before


@pytest.mark.extended
@pytest.mark.parametrize("changed", ["algorithm.group_size=2", "algorithm=dapo"])
def test_named_it_ends_the_groups_in_progress_and_the_run_goes_on_under_the_new_settings(copy, changed):
    checkpoint = complete_checkpoints(copy / "run")[1]
    groups = savepoint.groups_in_progress(savepoint.read(checkpoint))
    key = "algorithm.name" if changed == "algorithm=dapo" else changed.partition("=")[0]
    done = resume(copy, changed, f"run.resume_changed=[{key}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "settings changed by this resume: " in done.stdout and f"{key}=" in done.stdout
    assert "device.operators=cpu (was plain)" in done.stdout, "which is known only when the kind of the cards is"
    assert yaml.safe_load((copy / "run" / "config.yaml").read_text())["device"]["operators"] == "cpu"
    assert [row["step"] for row in rows_of(copy / "run")] == [1, 2, 3]
    ended = [json.loads(line) for line in (copy / "run" / "groups.jsonl").read_text().splitlines()]
    assert sorted(row["group"] for row in ended if row["ended"] == "failed:resume_changed") == sorted(groups)
    assert len({row["group"] for row in ended}) == len(ended), "each group has ended once"
    sizes = {len(row["response_tokens"]) for row in ended if row["step"] > 1 and row["ended"] == "trained"}
    assert sizes == ({2} if key == "algorithm.group_size" else {4})


@pytest.mark.parametrize("named", [False, pytest.param(True, marks=pytest.mark.extended)])
def test_a_flipped_bit_of_the_model_is_refused_by_key_and_file_unless_the_key_is_named(copy, named):
    (file,) = (copy / "model").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    done = resume(copy, *(["run.resume_changed=[model.path]"] if named else []))
    if named:
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"model.path (other content of {file.name})" in done.stdout
    else:
        expected = f"model.path: cannot resume: other content of {file.name}. run.resume_changed=[model.path] resumes"
        assert done.returncode == 1 and expected in done.stderr and "start Ray" not in done.stdout, done.stderr


@pytest.mark.extended
def test_a_finished_cosine_schedule_goes_on_without_a_jump_and_the_end_says_how(base, tmp_path):
    options = ["run.eval_prompts=0", "training.schedule=cosine", "training.lr=1e-3"]
    done = train(base, tmp_path, *options, "run.steps=3")
    assert done.returncode == 0 and "run.resume=true run.steps=6 training.lr=0.0005 " in done.stdout, done.stderr
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    done = train(base, tmp_path, *options, "run.steps=2", "run.resume=true")
    assert done.returncode == 1 and "run.steps=2: expected at least the 3 steps that are done" in done.stderr
    done = train(base, tmp_path, *options, "run.steps=6", "run.resume=true")
    assert done.returncode == 0 and "training.schedule=cosine: the learning rate decays from 0.00025 at" in done.stdout
    rates = [row["actor/lr"] for row in rows_of(tmp_path / "run")]
    assert rates == sorted(rates, reverse=True) and rates[:3] == pytest.approx([1e-3, 7.5e-4, 2.5e-4])
    options[-1] = "training.lr=5e-4"
    done = train(base, tmp_path, *options, "run.steps=6", "run.resume=true", "run.name=again")
    assert done.returncode == 0, done.stderr
    assert [row["actor/lr"] for row in rows_of(tmp_path / "again")][3] == 5e-4
