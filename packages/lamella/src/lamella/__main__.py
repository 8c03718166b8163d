"""`python -m lamella`, and the `lamella` command."""

import os
import sys

from lamella._processes.placement import under_torchrun
from lamella._record.output import flush_outputs
from lamella.cli import main as _main


def main() -> int:
    """Run the command line; under torchrun end the process without the interpreter's exit, see `run_as_worker`."""
    code = _main()
    flush_outputs()
    if under_torchrun():
        os._exit(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
