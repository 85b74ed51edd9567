import subprocess
import sys

import pytest

from tests.machine import run

PROGRAM = """
import sys
from rich.console import Console
from fusion.resources import outlive_readers
outlive_readers()
print("begins", flush=True)
sys.stdin.read()
for line in range(3):
    print("a line", flush=True)
    Console().print("another")
    print("a warning", file=sys.stderr)
open(sys.argv[1], "w").write("done")
"""


@pytest.mark.parametrize("stderr", [subprocess.PIPE, subprocess.STDOUT])
def test_a_process_goes_on_when_the_reader_of_its_output_has_ended(tmp_path, stderr):
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True)
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path / "end")], **pipes) as process:
        assert process.stdout.readline() == "begins\n"
        process.stdout.close()
        process.stdin.close()
        others = "" if process.stderr is None else process.stderr.read()
        assert process.wait() == 0 and (tmp_path / "end").read_text() == "done"
    assert others == ("" if process.stderr is None else "a warning\n" * 3)


def test_a_file_and_a_pipe_with_a_reader_get_everything(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "end")]
    piped = run(command, 60, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True).stdout
    with (tmp_path / "out").open("w") as file:
        run(command, 60, stdin=subprocess.DEVNULL, stdout=file)
    assert piped == (tmp_path / "out").read_text() == "begins\n" + "a line\nanother\n" * 3
