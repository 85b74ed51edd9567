import sys

import pytest

from fusion.telemetry.loggers import check_loggers, find_loggers
from fusion.telemetry.loggers.registry import BUILT_IN
from stalesync.job.config import RunConfig


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["wandv"], r"run.loggers: unknown logger 'wandv': expected tensorboard, wandb, .* or module:Class"),
        (["tensorboard", "tensorboard"], r"run.loggers=\['tensorboard', 'tensorboard'\]: expected each logger once"),
        (["no_such_module:Mine"], "run.loggers: no_such_module:Mine: there is no module 'no_such_module'.* PYTHONPATH"),
        (["no.such.module:Mine"], "there is no module 'no.such.module'"),
        (["module:"], "unknown logger 'module:'"),
        ([""], "unknown logger ''"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_key(names, message):
    with pytest.raises(ValueError, match=message):
        check_loggers(names)
    with pytest.raises(ValueError, match=message):
        RunConfig(loggers=names).validate()


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_a_missing_library_is_refused_with_the_command_that_installs_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(ValueError, match=f"run.loggers: {name} is not installed: pip install {name}"):
        check_loggers(["json:JSONEncoder", name])


def test_checking_imports_no_library(monkeypatch):
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    RunConfig(loggers=["tensorboard"]).validate()
    assert "tensorboard" not in sys.modules


def test_a_class_of_ones_own_is_found_and_errors_of_its_module_are_named(tmp_path, monkeypatch):
    (tmp_path / "mine_for_test.py").write_text("class Mine:\n    pass\n")
    (tmp_path / "broken_for_test.py").write_text("import no_such_library\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_loggers(["mine_for_test:Mine"])["mine_for_test:Mine"].__name__ == "Mine"
    with pytest.raises(ValueError, match="run.loggers: mine_for_test:Other: expected a class Other"):
        find_loggers(["mine_for_test:Other"])
    with pytest.raises(ValueError, match="broken_for_test:Mine: cannot be imported: ModuleNotFoundError"):
        find_loggers(["broken_for_test:Mine"])
    assert find_loggers([]) == {}
