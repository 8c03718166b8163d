"""The README's examples run as they stand."""

import re
from importlib.metadata import metadata
from pathlib import Path


def readme():
    file = Path(__file__).parents[1] / "README.md"
    return file.read_text() if file.is_file() else metadata("lamella-convert").get_payload()


def test_the_examples_convert_load_and_publish(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for example in re.findall(r"```python\n(.*?)```", readme(), flags=re.DOTALL):
        assert len(example.strip().splitlines()) <= 14
        exec(example, names)
    assert (tmp_path / "exports" / "second" / "model.safetensors").is_file()
