"""Rows of JSON files are what the standard library reads; the chosen field is text, as the file has it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.prompts.json_rows import JsonRows, parse_object

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=4), VALUES, max_size=5)


@given(OBJECTS, st.booleans(), st.sampled_from([None, 1]))
def test_an_object_is_what_the_standard_library_reads(fields, ascii, indent):
    text = json.dumps(fields, ensure_ascii=ascii, indent=indent)
    assert parse_object(text, "no such field") == fields
    for name, value in fields.items():
        read = parse_object(text, name)[name]
        assert read == value if value is None or isinstance(value, str) else json.loads(read) == value


@given(st.text(max_size=30) | OBJECTS.map(json.dumps).flatmap(lambda text: st.integers(0, 30).map(lambda i: text[:i])))
def test_what_the_standard_library_refuses_is_refused(text):
    try:
        expected = json.loads(text)
    except ValueError:
        expected = None
    if isinstance(expected, dict):
        assert parse_object(text, "no such field") == expected
    else:
        with pytest.raises(ValueError):
            parse_object(text, "no such field")


@pytest.mark.parametrize(
    "answer",
    ["2024-01-01", "12345678901234567890", "007", "1e400"],
)
def test_a_text_stays_the_text(tmp_path, answer):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"a": answer}))
    assert JsonRows(file, "a")[0]["a"] == answer


@pytest.mark.parametrize(
    "answer", ["12345678901234567890", "[2, 2.5]", "2.50", "1e-7", "0.1", "true", '{"x":  1}', "[1,2]", "-0", "1E5"]
)
def test_any_other_value_is_the_text_in_the_file(tmp_path, answer):
    for name, content in (("rows.jsonl", f'{{"a" : {answer} }}\r\n\n'), ("rows.json", f' [{{"a": {answer}}}]\n')):
        (tmp_path / name).write_text(content)
        rows = JsonRows(tmp_path / name, "a")
        assert len(rows) == 1 and rows[0]["a"] == answer


@settings(max_examples=30)
@given(st.lists(OBJECTS, max_size=5), st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_lines_and_arrays_have_the_same_rows(tmp_path_factory, objects, ascii, indent, bom):
    folder = tmp_path_factory.mktemp("rows")
    start = "\ufeff" if bom else ""
    lines = "".join(json.dumps(one, ensure_ascii=ascii) + "\n" for one in objects)
    (folder / "lines.jsonl").write_text(start + (lines or "\n"))
    (folder / "array.json").write_text(start + json.dumps(objects, ensure_ascii=ascii, indent=indent))
    for name in ("lines.jsonl", "array.json"):
        rows = JsonRows(folder / name, "no such field")
        assert [rows[i] for i in range(len(rows))] == objects


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter at character 9"),
        (b'{"a": 1,}', "not valid JSON: Expecting property name"),
        (b'{"a": 1} {"a": 2}', "not valid JSON: Extra data at character 10"),
        (b'{"a": 1, "a": 2}', "the field 'a' is there twice"),
        (b'"a"', "not a JSON object"),
        (b'{"a": "\xff"}', "not valid UTF-8: invalid start byte at byte 8"),
        (b'{"a": ' + b"[" * 100_000 + b"}", "not valid JSON: nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "Exceeds the limit"),
    ],
)
def test_a_bad_line_is_an_error_of_its_row_only(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"a": "first"}\n' + line + b'\n{"a": "last"}\n')
    rows = JsonRows(file, "b")
    assert (rows[0], rows[2]) == ({"a": "first"}, {"a": "last"})
    with pytest.raises(ValueError, match=message):
        rows[1]


@pytest.mark.parametrize("array", ["[1, ]", "[1 2]", "[1", '[{"a": 1}] 2', "[" * 100_000])
def test_a_broken_array_is_refused(tmp_path, array):
    file = tmp_path / "rows.json"
    file.write_text(array)
    with pytest.raises(ValueError, match=r"row \d of the array is not valid JSON"):
        JsonRows(file, "a")


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": 1}\n{"a": 2}\n')
    rows = JsonRows(file, "a")
    assert rows[0] == {"a": "1"}
    with file.open("a") as same:
        same.write('{"a": 3}\n')
    with pytest.raises(ValueError, match="was changed while it was read"):
        rows[1]
