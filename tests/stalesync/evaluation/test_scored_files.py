"""Files and their rewards, without cards: what is refused before the start, scores, and failures by name."""

import json

import pytest

from fusion.rewards import RewardOutcome, RewardPool
from fusion.rollout import EvalAnswer
from stalesync.evaluation import EvalConfig, Evaluation
from stalesync.evaluation.files import open_files, with_rewards
from stalesync.evaluation.results import FileResult
from stalesync.job.config import Config
from stalesync.loop.controller import Controller
from stalesync.loop.evaluator import Evaluator
from stalesync.loop.step import Step
from stalesync.policy.commands import Publish
from stalesync.process.failures import CardFailed, RewardsFailed
from stalesync.prompts import PromptSource, make_tokenizer
from stalesync.prompts.rows import RowCounts
from stalesync.scoring.scoring import Scorer
from stalesync.scoring.sources import RuleReward
from tests.stalesync.loop.fakes import Generation, make_controller

REWARDS = """
def exact(prompt, response, answer):
    return float(response == answer)

def broken(prompt, response, answer):
    raise RuntimeError("no judge at all")

def levelled(prompt, response, answer, level):
    return float(level)
"""


class NoReward:
    """The run's own reward, of which these files ask nothing."""

    concurrent = True

    def __call__(self, samples):
        raise AssertionError("the run's own reward was asked")

    def take_reports(self):
        return []


@pytest.fixture
def rewards(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(REWARDS)
    return path


@pytest.fixture
def opened(tmp_path):
    """Opens evaluations; the processes of their rewards end with the test."""
    pools = []

    def start(reward):
        pools.append(RewardPool(reward))
        return pools[-1]

    def open_(*files, rule=None, rows=6, **fields):
        config = Config()
        config.data.max_prompt_length, config.reward.workers = 8, 1
        path = tmp_path / "sums.jsonl"
        path.write_text(
            "".join(json.dumps({"prompt": f"{n}+1=", "answer": n + 1} | fields) + "\n" for n in range(rows))
        )
        config.eval = EvalConfig(files=[{"path": str(path), **file} for file in files], samples=2)
        config.eval.validate()
        found = with_rewards(config, open_files(config, make_tokenizer()), held_out=[], rule=rule, start=start)
        return Evaluation(config.eval, found, max_failed_share=config.reward.max_failed_share), pools

    yield open_
    for pool in pools:
        pool.close()


def answers_to(file, texts):
    """The same texts, one after another, for every prompt."""
    asked = file.asked(len(texts))
    return {
        prompt.id: EvalAnswer(prompt.id, texts[index % len(texts)].format(answer=prompt.answer), 3, "stop")
        for index, prompt in enumerate(asked)
    }


def test_every_prompt_is_asked_as_often_as_configured_in_the_order_of_the_file(opened):
    evaluation, _ = opened({"name": "a", "reward": "math", "rows": 2})
    asked = evaluation.files[0].asked(3)
    assert [prompt.id for prompt in asked] == [f"eval-a-{row}{number}" for row in (0, 1) for number in ("", "/1", "/2")]
    assert [prompt.text for prompt in asked] == ["0+1="] * 3 + ["1+1="] * 3


def test_answers_are_scored_by_the_reward_of_their_file_and_one_that_files_share_is_started_once(opened, rewards):
    exact = f"{rewards}:exact"
    evaluation, pools = opened({"name": "a", "reward": exact}, {"name": "b", "reward": exact, "rows": 1})
    assert len(pools) == 1
    scorer = Scorer(NoReward(), queue=None)
    first, second = evaluation.files
    result = evaluation.score(first, scorer, answers_to(first, ["{answer}", "no"]), step=4)
    assert (result.step, result.file, result.reward, result.prompts, result.failed) == (4, "a", exact, 6, 0)
    assert {name: one.value for name, one in result.estimates.items()} == {
        "reward/mean@2": 0.5,
        "reward/pass@1": 0.5,
        "reward/pass@2": 1.0,
        "response_length/mean@2": 3.0,
    }
    assert result.answers[1] == {"prompt": "1+1=", "answer": "2", "response": "2", "reward": 1.0}
    assert len(result.answers) == 6 and result.right == "1" * 6, "of the first answers"
    assert evaluation.score(second, scorer, answers_to(second, ["no", "no"]), step=4).mean.value == 0.0


def test_the_length_of_a_conversation_whose_environment_failed_is_not_0(opened, rewards):
    evaluation, _ = opened({"name": "a", "reward": f"{rewards}:exact"}, rows=2)
    (file,) = evaluation.files
    answers, failed = answers_to(file, ["no", "no"]), file.asked(2)[0].id
    answers[failed] = EvalAnswer(failed, "", 0, "abort")
    known = {failed: RewardOutcome(None, "env_raised")}
    result = evaluation.score(file, Scorer(NoReward(), queue=None), answers, step=4, known=known)
    assert (result.failed, result.estimates["response_length/mean@2"].value) == (1, 3.0)


@pytest.mark.parametrize(("rows", "share"), [(6, "none of 12 answers"), (40, "64 of the last 64 samples")])
def test_a_reward_that_fails_ends_the_run_with_the_name_of_its_file_and_its_own(opened, rewards, rows, share):
    evaluation, _ = opened({"name": "hard", "reward": f"{rewards}:broken"}, rows=rows)
    (file,) = evaluation.files
    with pytest.raises(RewardsFailed) as failed:
        evaluation.score(file, Scorer(NoReward(), queue=None), answers_to(file, ["1", "2"]), step=7)
    message = str(failed.value)
    assert message.startswith(f"evaluation of 'hard' ({file.path}) with the reward {rewards}:broken after step 7: ")
    assert share in message and "no judge at all" in message


def test_what_a_file_lacks_is_refused_with_its_name(opened, rewards):
    file = {"name": "hard", "reward": f"{rewards}:levelled"}
    with pytest.raises(ValueError, match=r"eval.files: 'hard': reward.path=.*requires the field 'level', which the"):
        opened(file)
    opened(file, level=3)
    with pytest.raises(ValueError, match="eval.files: 'hard': .*mine.py:absent.*: the file defines no function"):
        opened({"name": "hard", "reward": f"{rewards}:absent"})
    with pytest.raises(ValueError, match="eval.files: 'hard': data.prompt_field='q': .* has no such field"):
        opened({"name": "hard", "prompt_field": "q"})
    with pytest.raises(ValueError, match="eval.files: 'hard': .*: no such file"):
        opened({"name": "hard", "path": "nowhere.jsonl"})


def test_the_runs_own_reward_must_have_the_fields_that_it_requires_in_every_file(opened, rewards):
    config = Config()
    config.reward.path, config.reward.workers = f"{rewards}:levelled", 1
    with RewardPool(config.reward) as own:
        with pytest.raises(ValueError, match="eval.files: 'a': .*requires the field 'level'"):
            opened({"name": "a"}, rule=own)
        evaluation, pools = opened({"name": "a"}, rule=own, level=1)
    assert not pools and evaluation.files[0].pool is None


def test_a_file_whose_answers_a_rule_can_never_match_is_refused(opened):
    with pytest.raises(ValueError, match="eval.files: 'a': the reward math can never match 6 of 6 reference answers"):
        opened({"name": "a", "reward": "math"}, answer="\\boxed{}")


def test_a_card_that_fails_while_it_answers_leaves_a_note_of_the_file(opened):
    commands = []

    class Settling(Controller):
        def settle(self):
            commands.append("settle")

        def execute(self, command):
            commands.append(command)

        def end_publish(self): ...

    class Failing(Generation):
        def begin_answers(self, *_, **__):
            raise CardFailed("rank 0 failed in stage 'answer'")

    loop = make_controller([], kind=Settling, generation=Failing([]))
    loop.last = Step(3, loop.rows, logged=True)
    evaluation, _ = opened({"name": "hard", "reward": "math"})
    with pytest.raises(CardFailed) as failed:
        Evaluator(evaluation=evaluation, loop=loop).evaluate()
    assert commands == ["settle", Publish(0)], "samples in progress are settled before the engines answer"
    assert failed.value.__notes__ == [f"evaluation of {evaluation.files[0].describe()} after step 3"]


def test_every_row_of_a_file_is_accounted_for_in_words_metrics_and_results(tmp_path):
    config = Config()
    config.data.max_prompt_length, config.data.long_prompts, config.data.bad_rows = 4, "skip", "skip"
    path = tmp_path / "sums.jsonl"
    rows = [{"prompt": f"{n}+1=", "answer": n} for n in range(40)] + [{"prompt": "", "answer": 1}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.eval = EvalConfig(files=[{"path": str(path), "name": "all"}, {"path": str(path), "name": "few", "rows": 12}])
    with RewardPool(config.reward) as rule:
        files = with_rewards(config, open_files(config, make_tokenizer()), held_out=[], rule=rule, start=RewardPool)
        result = Evaluation(config.eval, files).score(
            files[0], Scorer(RuleReward(rule), None), answers_to(files[0], ["1"]), 0
        )
    assert [file.rows for file in files] == [RowCounts(41, 1, 0, 30, 10), RowCounts(41, 1, 28, 2, 10)]
    assert files[0].rows.describe() == (
        "41 rows read, 1 cannot be used (data.bad_rows), 30 longer than data.max_prompt_length (data.long_prompts), "
        "10 evaluated"
    )
    assert result.metrics()["val-aux/all/rows/dropped"] == 31.0
    assert result.row()["rows"] == {"read": 41, "bad": 1, "unused": 0, "too_long": 30, "evaluated": 10}
    assert FileResult.from_row(result.row()) == result
    assert FileResult.from_row({k: v for k, v in result.row().items() if k != "rows"}).rows == {}


def test_only_an_evaluation_with_a_later_one_is_before_the_training(opened):
    evaluation, _ = opened({"name": "a", "reward": "math"})
    (file,) = evaluation.files
    scorer = Scorer(NoReward(), queue=None)
    for step, means in ((0, "0.500"), (3, "0.500 before, 1.000 after step 3")):
        texts = ["{answer}", "{answer}" if step else "-1"]
        evaluation.history.add([evaluation.score(file, scorer, answers_to(file, texts), step)])
        assert evaluation.notes() == [f"reward on a: {means} (evaluations.jsonl)"]


def test_held_out_rows_that_are_too_long_are_counted(tmp_path):
    config = Config()
    config.data.max_prompt_length, config.data.long_prompts = 4, "skip"
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": n}) + "\n" for n in range(5, 105)))
    config.data.source = str(path)
    source = PromptSource(config.data, make_tokenizer(), 0, held_out=10)
    counts = source.counts(source.evaluation(10), 10)
    assert counts.read == 10 and counts.evaluated == len(source.evaluation(10)) < 10
    assert counts.too_long == 10 - counts.evaluated
