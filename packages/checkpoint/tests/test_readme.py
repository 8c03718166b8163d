"""The README's examples run as they stand."""

import re
from importlib.metadata import metadata
from pathlib import Path


def readme():
    file = Path(__file__).parents[1] / "README.md"
    return file.read_text() if file.is_file() else metadata("lamella-checkpoint").get_payload()


def test_the_example_saves_and_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in re.findall(r"```python\n(.*?)```", readme(), flags=re.DOTALL):
        assert len(example.strip().splitlines()) <= 14
        exec(example, names)
    assert names["step"] == 100
