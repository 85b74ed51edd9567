from fusion.telemetry.page.settings import differences, flatten


def test_only_keys_that_differ_are_listed_the_name_last():
    first = flatten({"run": {"name": "a", "steps": 1}, "training": {"betas": [0.9, 0.99]}, "reward": {}})
    second = flatten({"run": {"name": "b", "steps": "1"}, "training": {"betas": [0.9, 0.99]}})
    assert first == {"run.name": '"a"', "run.steps": "1", "training.betas": "[0.9, 0.99]", "reward": "{}"}
    assert differences([first, second]) == [
        {"key": "run.steps", "values": ["1", '"1"']},
        {"key": "reward", "values": ["{}", None]},
        {"key": "run.name", "values": ['"a"', '"b"']},
    ]
    assert differences([first, first]) == [] == differences([first])
