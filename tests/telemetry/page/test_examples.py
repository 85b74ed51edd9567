from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry.page.examples import MAX_CHARACTERS, MAX_CONVERSATION, MAX_MESSAGES, PER_KIND, Examples
from fusion.telemetry.shortening import shortened

rewards = st.lists(st.one_of(st.none(), st.integers(-3, 3).map(float), st.just(float("nan"))), max_size=40)


@given(rewards, st.integers(1, 6))
def test_no_sample_is_better_than_the_best_nor_worse_than_the_worst(rewards, per_step):
    examples = Examples()
    for index, reward in enumerate(rewards):
        examples.add({"step": index // per_step, "reward": reward, "prompt": "p", "response": str(index)})
    chosen = examples.result()
    scored = [(reward, index) for index, reward in enumerate(rewards) if reward is not None and reward == reward]
    best = [int(one["response"]) for one in chosen["best"]]
    worst = [int(one["response"]) for one in chosen["worst"]]
    assert best == [index for _, index in sorted(scored, reverse=True)][:PER_KIND]
    assert worst == [index for _, index in sorted(scored, key=lambda one: (one[0], -one[1]))][:PER_KIND]
    steps = [index // per_step for index in range(len(rewards))]
    first = [index for index, step in enumerate(steps) if step == 0]
    last = [index for index, step in enumerate(steps) if step == steps[-1]]
    assert [int(one["response"]) for one in chosen["before"]] == first[:PER_KIND]
    assert [int(one["response"]) for one in chosen["now"]] == last[:PER_KIND]


def test_messages_of_a_conversation_are_shown_and_shortened():
    examples, long = Examples(), "a" * 3 * MAX_CHARACTERS
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": long},
        {"role": "tool", "content": "1"},
    ]
    examples.add({"step": 1, "reward": 1.0, "prompt": "p", "response": long, "messages": messages})
    examples.add({"step": 1, "reward": 0.0, "prompt": "p", "response": "r"})
    first, second = examples.result()["before"]
    assert [one["role"] for one in first["messages"]] == ["user", "assistant", "tool"] and "messages" not in second
    assert len(first["messages"][1]["content"]) < len(long) and first["messages"][2]["content"] == "1"


def test_a_long_text_keeps_both_ends():
    text = shortened("a" * MAX_CHARACTERS + "b" * MAX_CHARACTERS, MAX_CHARACTERS)
    assert text.startswith("aaa") and text.endswith("bbb") and "6,000 characters left out" in text
    assert shortened("short", 9) == "short" and shortened(7, 9) == "7"


def test_a_conversation_of_many_long_messages_is_bounded_and_marks_its_branches():
    examples, message = Examples(), {"role": "tool", "content": "word " * 100_000}
    messages = [{**message, "role": str(n)} for n in range(3 * MAX_MESSAGES)]
    examples.add({"step": 1, "prompt": "p", "response": "r", "messages": messages, "branches": [2, "2", MAX_MESSAGES]})
    (row,) = examples.result()["before"]
    roles = [one["role"] for one in row["messages"]]
    half = MAX_MESSAGES // 2
    assert roles[:half] + roles[half + 1 :] == [str(n) for n in (*range(half), *range(5 * half, 6 * half))]
    assert row["messages"][half]["content"] == f"… {2 * MAX_MESSAGES} messages left out …"
    assert sum(len(one["content"]) for one in row["messages"]) < 2 * MAX_CONVERSATION
    assert [one["role"] for one in row["messages"] if one.get("branch")] == ["2"]
