"""Checkpoints as somebody else would have written them."""

import json


def forget_checksums(path):
    """As releases wrote it that kept none."""
    (path / "lamella_checksums.json").unlink(missing_ok=True)
    file = path / "lamella.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"checksums": None}))
