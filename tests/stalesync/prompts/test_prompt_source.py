import datetime
import json
import time
from decimal import Decimal
from pathlib import Path

import datasets
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stalesync.prompts import DataConfig, PromptSource, files, make_tokenizer
from tests import machine

GSM8K = Path(__file__).parents[3].parent / "shared/data/gsm8k_test.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


@pytest.fixture
def jsonl(tmp_path):
    """Eleven rows, prompts of 1 to 11 characters."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": "1" * (i + 1), "a": i, "level": f"l{i}"}) + "\n" for i in range(11)))
    return file


def source_of(tokenizer, file="addition", seed=0, held_out=0, **changes) -> PromptSource:
    fields = {"prompt_field": "q", "answer_field": "a"}
    return PromptSource(DataConfig(source=str(file), **{**fields, **changes}), tokenizer, seed, held_out)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    kind=st.sampled_from(
        ["addition", "worked_arithmetic", "file", "file skip", "first worked_arithmetic", "first file"]
    ),
    seed=st.integers(0, 3),
    cuts=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=8),
)
def test_invariants_of_the_order(tokenizer, jsonl, kind, seed, cuts):
    changes = {"max_prompt_length": 6, "long_prompts": "skip"} if kind == "file skip" else {}
    changes = {"rows": 7} if kind.startswith("first") else changes
    name = jsonl if "file" in kind else kind.removeprefix("first ")

    def fresh():
        return source_of(tokenizer, name, seed, **changes)

    source, given_out = fresh(), []
    for count, resume in cuts:
        given_out += source.next(count)
        if resume:
            state = json.loads(json.dumps(source.state_dict()))
            source = fresh()
            source.load_state_dict(state)
    straight = fresh()
    assert given_out == straight.next(len(given_out))
    assert source.metrics() == straight.metrics()
    assert len({prompt.id for prompt in given_out}) == len(given_out)
    epoch = {"addition": 100, "file": 11, "file skip": 6, "first worked_arithmetic": 7, "first file": 7}.get(kind)
    if epoch:
        for number in range(len(given_out) // epoch):
            rows = given_out[number * epoch : (number + 1) * epoch]
            assert {prompt.id.split("-")[0] for prompt in rows} == {f"e{number}"}
            assert len({prompt.text for prompt in rows}) == epoch
    if kind == "file skip":
        assert all(len(prompt.ids) <= 6 for prompt in given_out)


def test_the_order_changes_with_seed_and_epoch(tokenizer):
    texts = [[p.text for p in source_of(tokenizer, seed=seed).next(200)] for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][:100] != texts[0][100:] and sorted(texts[0][:100]) == sorted(texts[0][100:])


def test_more_rows_than_the_file_has_are_refused(tokenizer, jsonl):
    with pytest.raises(ValueError, match="data.rows=12: data.source=.* has 11 rows to train on"):
        source_of(tokenizer, jsonl, rows=12)


def test_a_state_of_another_run_is_refused(tokenizer, jsonl):
    state = source_of(tokenizer, jsonl).state_dict()
    with pytest.raises(ValueError, match="the saved run had run.seed=0, this one has 1"):
        source_of(tokenizer, jsonl, seed=1).load_state_dict(state)
    jsonl.write_text(jsonl.read_text() * 2)
    with pytest.raises(
        ValueError, match=r"the saved run had rows=11 in an epoch, this one has 22 .*run.eval_prompts\)"
    ):
        source_of(tokenizer, jsonl).load_state_dict(state)
    changed = source_of(tokenizer, jsonl)
    changed.load_state_dict({**state, "position": 11}, other_order=True)
    assert [prompt.id.partition("-")[0] for prompt in changed.next(12)] == ["e0"] * 11 + ["e1"]


def test_rows_of_a_file_carry_answer_and_fields(tokenizer, jsonl, tmp_path):
    import pyarrow.json
    import pyarrow.parquet

    parquet = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.json.read_json(jsonl), parquet)
    for file in (jsonl, parquet):
        prompts = sorted(source_of(tokenizer, file).next(11), key=lambda prompt: len(prompt.text))
        assert [(p.text, p.answer, p.fields) for p in prompts] == [
            ("1" * (i + 1), str(i), {"level": f"l{i}"}) for i in range(11)
        ]
        assert [p.id for p in prompts] == [f"e0-{i}" for i in range(11)]
        assert prompts[3].ids == tuple(tokenizer("1111")["input_ids"])


def test_objects_of_a_parquet_file_keep_their_own_fields_only(tmp_path):
    def chat(**arguments):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        user = {"role": "user", "content": "1"}
        return [user, {"role": "assistant", "content": "2", "tool_calls": [call]}, user]

    chats = [chat(x=1), chat(y="z")]
    datasets.Dataset.from_dict({"q": chats, "a": ["1", "2"]}).to_parquet(file := tmp_path / "rows.parquet")
    config = DataConfig(source=str(file), prompt_field="q", answer_field="a")
    rows = files.FileRows(config, 0, check=lambda rows: [1] * len(rows))
    assert [rows.row(index).prompt for index in rows.indices] == chats


@pytest.mark.parametrize("value", [datetime.date(2026, 1, 2), Decimal("0.5"), b"bytes", [datetime.time(3)]])
def test_a_column_that_a_checkpoint_cannot_keep_is_refused_by_name(tokenizer, tmp_path, value):
    import pyarrow
    import pyarrow.parquet

    parquet = tmp_path / "rows.parquet"
    columns = {"q": ["1", "2"], "a": ["1", "2"], "seen": [value, value]}
    pyarrow.parquet.write_table(pyarrow.table(columns), parquet)
    with pytest.raises(ValueError, match="row 0.*: the column 'seen' holds a .*, which a checkpoint cannot keep"):
        source_of(tokenizer, parquet)


def test_long_prompts_are_refused_before_the_first_or_skipped_and_counted(tokenizer, jsonl):
    with pytest.raises(
        ValueError, match=r"row 6 .*7 tokens is longer than data.max_prompt_length=6.*long_prompts=skip"
    ):
        source_of(tokenizer, jsonl, max_prompt_length=6)
    source = source_of(tokenizer, jsonl, max_prompt_length=6, long_prompts="skip")
    source.next(6)
    source.next(6)
    source.next(1)
    assert source.metrics()["data/epoch"] == 2 and source.metrics()["data/skipped_prompts"] >= 10
    with pytest.raises(ValueError, match="data.max_prompt_length=4: no prompt is that short"):
        source_of(tokenizer, "worked_arithmetic", max_prompt_length=4, long_prompts="skip").next(1)
    with pytest.raises(ValueError, match="longest problem .*18 tokens.*data.max_prompt_length=17"):
        source_of(tokenizer, "worked_arithmetic", max_prompt_length=17)


def test_held_out_rows_of_a_file(tokenizer, tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"q": str(i), "a": i}) + "\n" for i in range(100)))
    source = source_of(tokenizer, file, held_out=7)
    held_out = source.evaluation(64)
    assert len(held_out) == 7 and held_out == source.evaluation(64)
    assert {p.text for p in held_out} | {p.text for p in source.next(93)} == {str(i) for i in range(100)}
    assert source_of(tokenizer, file).evaluation(64) == []
    assert len(source_of(tokenizer, file, held_out=64).evaluation(64)) == 10


def test_rows_that_repeat_a_held_out_one_are_not_trained(tokenizer, tmp_path, caplog):
    lines = [json.dumps({"q": str(i % 40), "a": "x", "level": i % 80}) for i in range(400)]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(lines))
    source = source_of(tokenizer, file, held_out=7)
    held_out = {(p.text, p.fields["level"]) for p in source.evaluation(64)}
    trained = {(p.text, p.fields["level"]) for p in source.next(350)}
    assert not held_out & trained and len(held_out | trained) == 80, "another field is another row"
    assert f"{5 * len(held_out) - 7} rows repeat held-out ones, and are not trained" in caplog.text
    file.write_text("\n".join(lines[:1] * 20))  # an environment may begin anew with each
    source = source_of(tokenizer, file, held_out=7)
    assert len(source.evaluation(64)) == 2 and len(source.next(18)) == 18
    assert "all rows repeat held-out ones" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"prompt_field": "question"},
            r"data.prompt_field='question': .*rows.jsonl has no such field; it has q, a, lev",
        ),
        ({"answer_field": "b"}, r"data.answer_field='b': .*rows.jsonl has no such field; it has q, a, level"),
        ({"prompt_field": "a", "answer_field": "q"}, r"row 0 .*data.prompt_field='a' holds a int.*10 other rows"),
        ({"prompt_field": "a"}, "data.answer_field='a': expected another field than data.prompt_field"),
    ],
)
def test_a_file_without_the_field(tokenizer, jsonl, changes, message):
    with pytest.raises(ValueError, match=message):
        source_of(tokenizer, jsonl, **changes)


def test_a_file_that_is_not_there_empty_broken_or_with_a_hole(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="data.source='/nowhere.jsonl': no such file"):
        source_of(tokenizer, "/nowhere.jsonl")
    for content, message in (
        ('{"q": "1", "a": 1}\n{"q": ', r"row 1 .*not valid JSON: Expecting value at character"),
        ("", "the file is empty"),
        ('{"q": "1", "a": 1}\n{"q": "2", "a": null}\n', r"row 1 .*data.answer_field='a' is empty"),
        ("\n \n", "the file has no rows"),
    ):
        file = tmp_path / f"rows{abs(hash(content))}.jsonl"
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            source_of(tokenizer, file)
    datasets.Dataset.from_dict({"q": [], "a": []}).to_parquet(file := tmp_path / "empty.parquet")
    with pytest.raises(ValueError, match="the file has no rows"):
        source_of(tokenizer, file)


def chat_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system message') }}{% endif %}"
        ":{{ m.content }};{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return tokenizer


GOOD = {"q": [{"from": "human", "value": "1"}], "a": 1}
BAD = {
    "not valid JSON": '{"q": ',
    "not a JSON object": "[1]",
    "there is no field data.prompt_field='q'; it has a": {"a": 1},
    "there is no field data.answer_field='a'; it has q": {"q": "1"},
    "the field data.answer_field='a' is empty": {"q": "1", "a": None},
    "is an empty text": {"q": "", "a": 1},
    "data.prompt_field='q' holds a float": {"q": 1.5, "a": 1},
    "message 0: content part 0 is of type 'image'": {"q": [{"role": "user", "content": [{"type": "image"}]}], "a": 1},
    "the chat template refuses the prompt: no system message": {
        "q": [{"role": "system", "content": "1"}, {"role": "user", "content": "1"}],
        "a": 1,
    },
    "the tokenizer refuses the prompt": {"q": "what?", "a": 1},
    "prompt or answer is not valid Unicode": {"q": "1", "a": "\ud800"},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_anywhere_is_refused_or_skipped_and_counted(tmp_path, monkeypatch, message):
    monkeypatch.setattr(files, "SCAN", 8)
    bad = BAD[message] if isinstance(BAD[message], str) else json.dumps(BAD[message])
    rows = [json.dumps(GOOD | {"level": 1})] * 30
    rows[20] = bad
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=rf"rows.jsonl' row 20 .*{message}.*or skip such rows with data.bad_rows=skip"):
        source_of(chat_tokenizer(), file)
    source = source_of(chat_tokenizer(), file, bad_rows="skip", held_out=2)
    names = [prompt.id for prompt in source.next(27)]
    assert source.metrics() == {"data/epoch": 0, "data/skipped_prompts": 0, "data/bad_rows": 1}
    assert len(set(names)) == 27 and "e0-20" not in names and source.rows.fields == {"level"}
    assert all(prompt.text == ":1;=" for prompt in source.evaluation(2))


def test_a_file_of_bad_rows_only_is_refused_in_any_case(tmp_path, tokenizer):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"q": "1"}\n{"q": 1, "a": 1}\n')
    with pytest.raises(ValueError, match="row 0 .*; so are 1 other rows"):
        source_of(tokenizer, file, bad_rows="skip")


def test_a_file_with_other_content_is_not_resumed_and_one_that_has_moved_is(tokenizer, jsonl):
    state = source_of(tokenizer, jsonl).state_dict()
    source_of(tokenizer, jsonl.rename(jsonl.with_name("moved.jsonl"))).load_state_dict(state)
    jsonl.with_name("moved.jsonl").rename(jsonl)
    jsonl.write_text(jsonl.read_text().replace("l10", "l99"))
    with pytest.raises(ValueError, match="cannot resume: data.source=.* has other content"):
        source_of(tokenizer, jsonl).load_state_dict(state)


def test_columns_called_as_an_argument_of_the_reward_are_not_passed_twice(tokenizer, tmp_path, caplog):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"q": "1", "a": 1, "response": "2", "level": 3}) + "\n")
    (prompt,) = source_of(tokenizer, file).next(1)
    assert prompt.fields == {"level": 3}
    assert "the columns response are not passed to the reward function" in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet"])
@pytest.mark.parametrize(
    ("field", "answer", "names"),
    [
        ("a", {"style": "rule", "ground_truth": "7"}, "a.style, a.ground_truth"),
        ("a.b", {"b": {"c": "7"}}, "a.b.c"),
        ("a", '{"ground_truth": "7"}', None),
        ("a.ground_truth", {"ground_truth": "7"}, None),
        ("a", [7], None),
    ],
)
def test_an_object_as_the_answer_is_warned_of_with_its_fields(tokenizer, tmp_path, caplog, kind, field, answer, names):
    rows, file = [{"q": "1", "a": answer}] * 3, tmp_path / f"rows.{kind}"
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if kind == "json" else "".join(json.dumps(row) + "\n" for row in rows))
    source_of(tokenizer, file, answer_field=field)
    warnings = [record.getMessage() for record in caplog.records]
    expected = f"data.answer_field={field!r}: an object, whose JSON text is the reference answer; its fields: {names}"
    assert warnings == ([] if names is None else [expected])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "adition"}, "data.source='adition': expected addition, .*calculator, guess, a path"),
        ({"prompts_per_step": 0}, "data.prompts_per_step=0"),
        ({"bad_rows": "keep"}, "data.bad_rows='keep': expected one of refuse, skip"),
        ({"long_prompts": "cut"}, "data.long_prompts='cut': expected one of refuse, skip"),
        ({"chat_template": "off"}, "data.chat_template='off'"),
        ({"max_digits": 11}, "data.max_digits=11: expected between data.min_digits=2 and 10"),
        ({"source": "counting", "max_digits": 1 << 18}, "data.max_digits=262144: expected at most 131072"),
        ({"min_digits": 5}, "data.max_digits=4: expected between data.min_digits=5"),
        ({"max_terms": 5}, "data.max_terms=5"),
    ],
)
def test_config_errors_name_the_key(changes, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**changes).validate()


def test_the_chat_template_is_used_where_there_is_one(tmp_path, jsonl):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}:{{ m['content'] }};{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    chats = tmp_path / "chats.jsonl"
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "3"}]
    chats.write_text(json.dumps({"q": chat, "a": 1}) + "\n")
    (prompt,) = source_of(tokenizer, chats).next(1)
    assert prompt.text == ":1;:2;:3;=" == tokenizer.decode(prompt.ids)
    first = {p.id: p for p in source_of(tokenizer, jsonl).next(11)}["e0-0"]
    assert first.text == "1" and tokenizer.decode(first.ids) == ":1;="
    plain = {p.id: p for p in source_of(tokenizer, jsonl, chat_template="never").next(11)}["e0-0"]
    assert plain.text == "1" == tokenizer.decode(plain.ids)
    with pytest.raises(ValueError, match="the prompt is a chat"):
        source_of(tokenizer, chats, chat_template="never")


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_nested_fields_are_read(tmp_path, tokenizer, kind):
    rows = [{"in": {"q": "12"}, "reward_model": {"ground_truth": 2.5, "style": "rule"}, "level": 1}] * 3
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    else:
        file.write_text("".join(json.dumps(row).replace("2.5", "2.50") + "\n" for row in rows))
    fields = {"prompt_field": "in.q", "answer_field": "reward_model.ground_truth"}
    (prompt,) = source_of(tokenizer, file, **fields).next(1)
    assert (prompt.text, prompt.answer) == ("12", "2.5" if kind == "parquet" else "2.50")
    # The columns stay as they are for a reward.
    assert prompt.fields == {name: rows[0][name] for name in ("in", "reward_model", "level")}
    for changes, message in (
        ({"answer_field": "reward_model.truth"}, "there is no field data.answer_field='reward_model.truth'"),
        ({"answer_field": "model.truth"}, "data.answer_field='model.truth': .* has no such field"),
        ({"prompt_field": "in.q.x"}, "there is no field data.prompt_field='in.q.x'"),
    ):
        with pytest.raises(ValueError, match=message):
            source_of(tokenizer, file, **fields | changes)


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not part of the project")
def test_gsm8k_rows():
    from transformers import ByT5Tokenizer

    rows = {row["question"]: row["answer"] for row in map(json.loads, GSM8K.read_text().splitlines())}
    config = DataConfig(source=str(GSM8K), prompt_field="question", max_prompt_length=512, long_prompts="skip")
    source = PromptSource(config, ByT5Tokenizer(), seed=3, held_out=64)
    held_out, prompts = source.evaluation(64), source.next(1000)
    assert all(rows[prompt.text] == prompt.answer and "####" in prompt.answer for prompt in prompts)
    assert all(len(prompt.ids) <= 512 for prompt in prompts)
    assert not {p.text for p in held_out} & {p.text for p in prompts} and held_out
    assert source.metrics()["data/skipped_prompts"] > 0


@pytest.mark.parametrize("field", ["q", "extra"])
@pytest.mark.parametrize("depth", [65, 500, 200_000])
def test_a_field_that_is_nested_too_deeply_is_refused_within_a_second(tokenizer, tmp_path, field, depth):
    nested, file = "[" * depth + "1" + "]" * depth, tmp_path / "rows.jsonl"
    texts = {"q": '"1"', "a": "1"} | {field: nested}
    row = ", ".join(f'"{name}": {text}' for name, text in texts.items())
    file.write_text(f"{{{row}}}\n")
    start_s = time.monotonic()
    with pytest.raises(
        ValueError, match=f"row 0 .*(the field '{field}' is nested more than 64 deep|nested too deeply)"
    ):
        source_of(tokenizer, file)
    assert machine.within(time.monotonic() - start_s, 1)
