"""The README's example runs and prints the README's output."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_the_layout_readme_example_prints_the_readmes_output() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (shown,) = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, README.name, "exec"), {})
    assert printed.getvalue() == shown
