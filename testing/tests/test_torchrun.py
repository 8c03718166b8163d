"""Programs under torchrun: their output, and ranks that share a GPU as hosts of one rank each."""

from pathlib import Path

import pytest

from lamella_testing.torchrun import torchrun

PROGRAM = """
import os, sys
names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"
print(*(os.environ.get(name) for name in names), *sys.argv[1:], sep="|", flush=True)
sys.exit(int(sys.argv[2]) * int(os.environ["RANK"]))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return str(file)


def test_ranks_that_share_a_gpu_are_hosts_of_their_own(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setenv("LAMELLA_RANKS_PER_GPU", "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    lines = torchrun(2, program, "argument", "0").splitlines()
    assert sorted(line for line in lines if "|" in line) == ["0|2|0|5|rank 0|argument|0", "1|2|0|5|rank 1|argument|0"]


@pytest.mark.slow  # another launcher
def test_a_program_has_the_ranks_of_one_host(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.delenv("LAMELLA_RANKS_PER_GPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    lines = torchrun(2, program, "argument", "0").splitlines()
    assert sorted(line for line in lines if "|" in line) == ["0|2|0|5,7|None|argument|0", "1|2|1|5,7|None|argument|0"]


@pytest.mark.slow  # another launcher
def test_a_failed_program_is_told_with_the_end_of_its_output(program: str) -> None:
    with pytest.raises(AssertionError, match="exitcode"):
        torchrun(2, program, "argument", "3")
