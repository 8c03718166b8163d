"""The process of one rank, started by `lamella train`: `python -m lamella._command.worker RUN_DIR`."""

import sys
from pathlib import Path

from lamella._processes.launch import run_as_worker
from lamella._processes.stop import StopRequests


def _work(requests: StopRequests) -> None:
    # Imported inside `run_as_worker`: a failing import reaches the error file like any other failure.
    from lamella._processes.determinism import deterministic
    from lamella._processes.endings import Stopped
    from lamella._processes.placement import process_group
    from lamella._record.run_directory import RunDirectory
    from lamella._settings.config import resolve
    from lamella._settings.files import read_file
    from lamella._training.trainer import Trainer

    root = Path(sys.argv[1])
    config = resolve(read_file(str(RunDirectory(root).config)))
    directory = RunDirectory(root, config.run.checkpoints)
    with deterministic(config.run), process_group(config.parallel, config.run.wait_limits) as rank:
        signum = Trainer(config, directory, rank, requests).train()
    if signum:
        raise Stopped(signum)


if __name__ == "__main__":
    run_as_worker(_work)
