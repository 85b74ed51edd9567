"""Wrong settings of an evaluation are refused by key."""

import json
from functools import reduce

import pytest

from stalesync.evaluation import EvalConfig
from stalesync.evaluation.config import EvalFileSpec
from stalesync.job.config import Config
from tests.helpers import tiny_checkpoint

METRICS = "val-core/held_out/reward/mean@1, val-core/held_out/reward/pass@1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"every": -1}, "eval.every=-1: expected a whole number of at least 0"),
        ({"samples": 0}, "eval.samples=0: expected a whole number of at least 1"),
        ({"pass_reward": "high"}, "eval.pass_reward='high': expected a number"),
        ({"temperature": -1.0}, "eval.temperature=-1.0: expected 0 .greedy decoding. or a number in"),
        ({"top_p": 0.0}, r"eval.top_p=0.0: expected a number in \(0, 1\]"),
        ({"top_k": -1}, "eval.top_k=-1: expected a whole number of at least 0"),
        ({"min_p": 2.0}, "eval.min_p=2.0: expected a number in"),
        ({"max_response_length": 0}, "eval.max_response_length=0: expected a whole number of at least 1"),
        ({"samples": 2, "temperature": 0.0}, "eval.samples=2: expected 1 with eval.temperature=0"),
        ({"files": "a.jsonl"}, "eval.files='a.jsonl': expected a list"),
        ({"files": [3]}, r"eval.files\[0\]=3: expected a path, or path and other fields of name, reward"),
        ({"files": [{"name": "a"}]}, r"eval.files\[0\]={'name': 'a'}: expected a path"),
        ({"files": ["a.csv"]}, r"eval.files\[0\].path='a.csv': expected a path ending in .jsonl or"),
        (
            {"files": [{"path": "a.jsonl", "nam": "b"}]},
            r"eval.files\[0\]: unknown field 'nam'.*; did you mean 'name'\?",
        ),
        ({"files": ["a.jsonl", {"path": "b.jsonl", "name": "x/y"}]}, r"eval.files\[1\].name='x/y': expected letters"),
        ({"files": [{"path": "a.jsonl", "name": "held_out"}]}, r"eval.files\[0\].name='held_out': expected another"),
        (
            {"files": ["x/a.jsonl", "y/a.jsonl"]},
            r"eval.files\[1\].name='a': expected another name than that of .*\[0\]",
        ),
        (
            {"files": [{"path": "a.jsonl", "reward": "maths"}]},
            r"eval.files\[0\].reward='maths': expected arithmetic, counting, ma",
        ),
        (
            {"files": [{"path": "a.jsonl", "reward": "no.py:f"}]},
            r"eval.files\[0\].reward='no.py:f': expected .* existing",
        ),
        ({"files": [{"path": "a.jsonl", "rows": 0}]}, r"eval.files\[0\].rows=0: expected a whole number of at least 1"),
        (
            {"files": [{"path": "a.jsonl", "answer_field": 1}]},
            r"eval.files\[0\].answer_field=1: expected the name of a",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_key(changes, message):
    with pytest.raises(ValueError, match=message):
        EvalConfig(**changes).validate()


def test_an_evaluation_differs_from_the_rollouts_only_in_what_it_states():
    assert EvalConfig().sampling == {}
    config = EvalConfig(temperature=0.0, top_p=0.9, top_k=0, max_response_length=7)
    config.validate()
    assert config.sampling == {"temperature": 0.0, "top_p": 0.9, "top_k": 0, "max_tokens": 7}


def test_a_path_alone_is_a_file_with_the_name_of_the_file_and_the_reward_of_the_run(tmp_path):
    reward = tmp_path / "mine.py"
    reward.touch()
    own = {"path": "b.parquet", "name": "b-1", "reward": f"{reward}:score", "prompt_field": "q", "rows": 3}
    assert EvalConfig(files=["data/math500.jsonl", own]).specs() == [
        EvalFileSpec(name="math500", path="data/math500.jsonl"),
        EvalFileSpec(name="b-1", path="b.parquet", reward=f"{reward}:score", prompt_field="q", rows=3),
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval__best": "reward"}, f"eval.best='reward': expected one of {METRICS}, val-aux/held_out/response_length"),
        ({"eval__best": "x", "run__eval_prompts": 0}, "eval.best='x': expected null, as nothing is evaluated"),
        ({"eval__best": "val-core/a/reward/mean@2", "eval__files": ["a.jsonl"]}, "expected one of val-core/held_out"),
        ({"eval__max_response_length": 60_000}, "eval.max_response_length=60000: expected at most"),
        (
            {"eval__max_response_length": 49, "rollout__engine__max_kv_tokens": 65, "rollout__engine__block_size": 16},
            "eval.max_response_length=49: expected at most 48, what is left of .* in rollout.engine.max_kv_tokens",
        ),
        (
            {"eval__samples": 2, "rollout__sampling__temperature": 0.0},
            "eval.samples=2: expected 1 with rollout.sampling.temperature=0",
        ),
    ],
)
def test_settings_that_do_not_fit_the_run_are_refused_by_key(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        configured(tmp_path, **changes).validate(trains=False)
    fits = {"eval__samples": 2, "rollout__sampling__temperature": 0.0, "eval__temperature": 0.5}
    configured(tmp_path, **fits, eval__files=["a.jsonl"], eval__best="val-aux/a/reward/pass@1").validate(trains=False)


def configured(folder, **changes):
    config = Config()
    config.model.path, config.data.source = tiny_checkpoint(folder / "base"), "addition"
    config.data.max_prompt_length = config.rollout.max_response_length = 16
    for path, value in changes.items():
        *groups, name = path.split("__")
        group = reduce(getattr, groups, config)
        assert hasattr(group, name)
        setattr(group, name, value)
    return config


def test_files_are_a_list_of_paths_and_mappings_on_the_command_line(tmp_path):
    from stalesync.standalone import parse_arguments
    from tests.warm import ROOT

    model = tmp_path / 'it\'s "modèle"'
    model.mkdir()
    (model / "config.json").write_text("{}")
    files = "eval.files=[data/a.jsonl,{path: b.jsonl, name: bb, rows: 2}]"
    parsed = parse_arguments([str(model), files, "reward=math", "--json", "-"], ROOT / "recipes" / "conf")
    assert [spec.name for spec in parsed.config.eval.specs()] == ["a", "bb"] and parsed.json == "-"
    config = parsed.config
    assert (config.reward.name, config.run.eval_prompts, config.model.path) == ("math", 0, str(model))
    assert config.data.source == "data/a.jsonl", "nothing is trained: no other data is needed"


def test_the_config_of_a_run_is_the_default_of_its_evaluation(tmp_path):
    from stalesync.standalone import parse_arguments
    from tests.warm import ROOT

    conf, run = ROOT / "recipes" / "conf", tmp_path / "one"
    run.mkdir()
    saved = {"run": {"eval_prompts": 3, "name": "one"}, "fusion": {"deployment": "full"}, "eval": {"best": "x"}}
    (run / "config.yaml").write_text(json.dumps(saved))
    (run / "checkpoints" / "step-4").mkdir(parents=True)
    for source, name in ((run, "evaluate-one"), (run / "checkpoints" / "step-4", "evaluate-one-step-4")):
        parsed = parse_arguments([str(source), "fusion=separate", "eval.samples=2", "eval.files=[a.jsonl]"], conf)
        config = parsed.config
        assert (config.run.name, config.run.eval_prompts, config.eval.best) == (name, 3, None)
        assert (config.fusion.deployment, config.eval.samples, config.eval.files) == ("separate", 2, ["a.jsonl"])
        assert not parsed.is_model
        assert parse_arguments([str(source), "run.name=mine"], conf).config.run.name == "mine"
    for kind, operators, stated, kept in (
        ("auto", "cuda", [], "auto"),
        ("auto", "plain", [], "plain"),
        ("npu", "ascend", [], "ascend"),
        ("cuda", "cuda", ["device=emulated"], "auto"),
        ("auto", "cuda", ["device.operators=cuda"], "cuda"),
    ):
        (run / "config.yaml").write_text(json.dumps(saved | {"device": {"kind": kind, "operators": operators}}))
        assert parse_arguments([str(run), *stated], conf).config.device.operators == kept, "other cards may evaluate"
    for arguments, message in (
        ([], "expected the folder of a run"),
        (["eval.samples=2"], "expected the folder of a run"),
        ([str(tmp_path)], "expected the folder of a run .with config.yaml., a checkpoint of it, or a model"),
        ([str(run), "eval.sampels=2"], "unknown key 'eval.sampels'; did you mean 'eval.samples'"),
        ([str(run), "eval.samples=many"], "many"),
        ([str(run), "fusion=mixed"], "fusion=mixed: expected one of colocated, "),
        ([str(run), "run.eval_prompts=0"], "eval.files=.*: expected files, or run.eval_prompts above 0"),
        ([str(run), "--json"], "--json: expected a path"),
        ([str(run), "--json", str(run)], "--json .*: expected a file in a folder that exists"),
        ([str(run), "--json", str(run / "no" / "x.json")], "--json .*: expected a file in a folder that exists"),
        ([str(run), "run.resume=true"], "run.resume: an evaluation alone takes no such setting"),
        ([str(run), "++eval.best=x"], "eval.best: an evaluation alone"),
        ([str(run), "model.path=other"], "model.path: an evaluation alone"),
        ([str(run), "run.steps=9"], "run.steps: an evaluation alone"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_arguments(arguments, conf)
