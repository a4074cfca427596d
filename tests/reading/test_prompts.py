import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specds.errors import PromptError
from specds.reading.prompts import BadRow, Prompt, read_prompts

from .conftest import user

# What each kind of row means


def test_prompt_is_one_user_turn(only):
    assert only({"prompt": "Sort a list."}) == Prompt("0", ((user("Sort a list."),),))


def test_turns_are_one_user_message_each(only):
    assert only({"turns": ["a", "b"]}).turns == ((user("a"),), (user("b"),))


def test_messages_are_one_turn_with_its_history(only):
    history = [{"role": "system", "content": ""}, user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert only({"messages": history}).turns == (tuple(history),)


def test_messages_keep_only_role_and_content(only):
    assert only({"messages": [{**user("a"), "name": "x", "weight": 1}]}).turns == ((user("a"),),)


def test_text_is_raw(only):
    prompt = only({"text": "def f("})
    assert prompt.raw
    assert prompt.turns == ((user("def f("),),)


def test_of_several_kinds_the_first_in_order_is_taken(only):
    row = {"text": "t", "prompt": "p", "turns": ["u"], "messages": [user("m")]}
    for expected in "mupt":
        prompt = only(row)
        assert prompt.turns == ((user(expected),),)
        assert prompt.raw == (expected == "t")
        row.popitem()


def test_null_field_counts_as_absent(only):
    assert only({"messages": None, "prompt": "p"}).turns == ((user("p"),),)


def test_prompt_keeps_its_white_space(only):
    assert only({"prompt": "  a\n"}).turns == ((user("  a\n"),),)


@pytest.mark.parametrize(
    ("reference", "expected"), [("r", "r"), (["r", "s"], "r"), ([], None), (42, None), (None, None), ({}, None)]
)
def test_reference(only, reference, expected):
    assert only({"prompt": "p", "reference": reference}).reference == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"id": "x"}, "x"),
        ({"id": 7}, "7"),
        ({"question_id": 81}, "81"),
        ({"id": "x", "question_id": 81}, "x"),
        ({"id": None, "question_id": 81}, "81"),
        ({"id": " "}, "0"),
        ({"id": [1]}, "0"),
        ({"id": True}, "0"),
        ({"id": "\ud800"}, "0"),
    ],
)
def test_id(only, row, expected):
    assert only({**row, "prompt": "p"}).id == expected
    assert only({**row, "prompt": 1}).id == expected  # a bad row is reported under the same id


def test_rows_are_numbered_from_0_over_all_files(write):
    first = write("a.jsonl", '{"prompt": "a"}\n\nbroken\n')
    second = write("b.txt", "c\nd\n")
    found = list(read_prompts([first, second]))
    assert [row.id for row in found] == ["0", "1", "2", "3"]
    assert [isinstance(row, BadRow) for row in found] == [False, True, False, False]


def test_prompt_field_named_is_the_only_one_looked_at(write):
    path = write("p.jsonl", '{"question": "q", "messages": []}\n{"prompt": "p"}')
    good, bad = read_prompts([path], prompt_field="question")
    assert good.turns == ((user("q"),),)
    assert "'question'" in bad.error.message


def test_text_field_named_as_the_prompt_is_no_raw_text(write):
    (prompt,) = read_prompts([write("p.jsonl", '{"text": "q"}')], prompt_field="text")
    assert not prompt.raw


# Rows that cannot be used


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"prompt": ', "is not JSON: Expecting value at column 12"),
        (b'{"prompt": "a"} {}', "is not JSON: Extra data at column 17"),
        (b'{"prompt": "\xff"}', "is not UTF-8: byte 0xff at offset 12"),
        (b'{"prompt": "a\0"}', "holds a NUL byte"),
        (b'{"prompt": "a\x07"}', "is not JSON: Invalid control character"),
        (b'["a"]', "must be an object, but is an array"),
        (b'"a"', "must be an object, but is a string"),
        (b"1", "must be an object, but is a number"),
        (b"null", "must be an object, but is null"),
        (b"[" * 100_000, "too deeply nested"),
        (b'{"prompt": ' * 100_000, "too deeply nested"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        (b'{"prompt": ' + b"1" * 5000 + b"}", "a number has too many digits"),
        (b"{}", "must have 'messages' or 'turns' or 'prompt' or 'text', but has nothing"),
        (b'{"promt": "a", "id": 1}', "but has 'promt', 'id'"),
        (b'{"prompt": null}', "but has 'prompt' (null)"),
        (b'{"prompt": 1}', "field 'prompt' must be a string, but is a number"),
        (b'{"prompt": true}', "field 'prompt' must be a string, but is a truth value"),
        (b'{"prompt": ["a"]}', "field 'prompt' must be a string, but is an array"),
        (b'{"prompt": ""}', "field 'prompt' must not be empty"),
        (b'{"prompt": " \\n\\u00a0"}', "field 'prompt' must not be empty"),
        (b'{"prompt": "\\ud83d"}', "field 'prompt' holds half of a surrogate pair"),
        (b'{"text": ""}', "field 'text' must not be empty"),
        (b'{"turns": "a"}', "field 'turns' must be a list of strings, but is a string"),
        (b'{"turns": []}', "field 'turns' must be a list of strings, but is empty"),
        (b'{"turns": ["a", 1]}', "field 'turns[1]' must be a string, but is a number"),
        (b'{"messages": {}}', "field 'messages' must be a list of messages, but is an object"),
        (b'{"messages": []}', "field 'messages' must be a list of messages, but is empty"),
        (b'{"messages": ["a"]}', "field 'messages[0]' must be a message, but is a string"),
        (b'{"messages": [{"role": "user"}]}', "field 'messages[0].content' must be a string, but is null"),
        (b'{"messages": [{"content": "a"}]}', "field 'messages[0].role' must be a string, but is null"),
        (b'{"messages": [{"role": "bot", "content": "a"}]}', "field 'messages[0].role' is 'bot'"),
        (b'{"messages": [{"role": "user", "content": " "}]}', "field 'messages[0].content' must not be empty"),
        (b'{"messages": [{"role": "system", "content": "a"}]}', "must end with a user's message"),
    ],
)  # fmt: skip
def test_bad_row_says_where_and_what_and_leaves_the_others(write, line, says):
    path = write("p.jsonl", b'{"prompt": "a"}\n' + line + b'\n{"prompt": "b"}\n')
    before, bad, after = read_prompts([path])
    assert before.turns == ((user("a"),),)
    assert after.turns == ((user("b"),),)
    assert isinstance(bad.error, PromptError)
    assert bad.error.message.startswith("p.jsonl:row 2")
    assert says in bad.error.message
    assert bad.error.hint
    assert "\n" not in bad.error.message + bad.error.hint


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just("user"),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["role", "content", "prompt", "messages", "turns", "id"]), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(_json)
def test_every_json_value_is_a_prompt_of_text_or_a_bad_row(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "p.jsonl"
    path.write_text(json.dumps(value))
    (row,) = read_prompts([str(path)])
    if isinstance(row, Prompt):
        assert row.turns
        for turn in row.turns:
            assert turn[-1]["role"] == "user"
            assert turn[-1]["content"].strip()
            assert all(isinstance(message["content"], str) for message in turn)
