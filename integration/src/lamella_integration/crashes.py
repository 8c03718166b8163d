"""Runs that save until killed, and damaged checkpoints, drawn from seeds for tests to repeat.

The seed of a crash decides the number of ranks, blocking or background saves, one path or a path per step, the process
to kill and the delay. Every element of a checkpoint is the number of the checkpoint's step: a mix of two checkpoints
shows.
"""

import math
import os
import random
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save as save_of_torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lamella_checkpoint import AsyncSaver, CheckpointDamaged, CheckpointFailed, CheckpointMismatch, load, save
from lamella_convert import convert, verify
from lamella_testing import RankFailure, run_ranks

_SHAPE: Final = (300, 1000)
_MAX_SAVES: Final = 40


@dataclass(frozen=True, kw_only=True)
class Crash:
    """A run of repeated saves, and the process to kill with SIGKILL."""

    num_ranks: int
    in_background: bool
    to_one_path: bool
    victim: int
    kills_writer: bool
    after_seconds: float

    @classmethod
    def draw(cls, seed: int, *, in_background: bool) -> "Crash":
        """Draw a crash from a seed."""
        draw = random.Random(seed)
        num_ranks = draw.choice([1, 2, 3])
        return cls(
            num_ranks=num_ranks,
            in_background=in_background,
            to_one_path=draw.random() < 0.5,
            victim=draw.randrange(num_ranks),
            kills_writer=in_background and draw.random() < 0.5,
            after_seconds=draw.uniform(0.0, 0.5),
        )

    def happen(self, root: Path) -> int:
        """Run until the crash; return the number of the last save that was started.

        Effects: forks ranks; leaves checkpoints under `root`, and in `root/known` the last step whose save completed.
        """
        try:
            run_ranks(self._save_until_killed, self.num_ranks, root)
        except RankFailure as failure:
            if "SIGKILL" not in str(failure) and "by peer" not in str(failure):  # or a peer's lost connection
                raise
        return int((root / "begun").read_text())

    def _save_until_killed(self, root: Path) -> None:
        model = _filled(0, sharded=True)
        path_of = (lambda _: root / "only") if self.to_one_path else (lambda step: root / str(step))
        saver = AsyncSaver() if self.in_background else None
        self._save(model, 1, path_of, root, saver)
        if saver is not None:
            saver.wait()  # The writer processes are running from here on.
        _tell(root / "known", 1)
        dist.barrier()
        self._arm(saver)
        for step in range(2, _MAX_SAVES):
            _tell(root / "begun", step)
            try:
                self._save(model, step, path_of, root, saver)
            except CheckpointFailed:  # The writer process was killed. The saver starts a new one for the next save.
                if saver is not None:
                    self._save(model, step, path_of, root, saver)
                    saver.close()
                    _tell(root / "known", step)
                    return

    def _save(
        self, model: nn.Module, step: int, path_of: Callable[[int], Path], root: Path, saver: AsyncSaver | None
    ) -> None:
        if saver is not None:
            saver.wait()
            _tell(root / "known", step - 1)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.fill_(step)
        if saver is not None:
            saver.save(path_of(step), model=model, extra={"step": step})
        else:
            save(path_of(step), model=model, extra={"step": step})
            _tell(root / "known", step)

    def _arm(self, saver: AsyncSaver | None) -> None:
        if dist.get_rank() == self.victim:
            process = saver and saver._process
            pid = process._popen.pid if self.kills_writer and process else os.getpid()
            timer = threading.Timer(self.after_seconds, os.kill, (pid, signal.SIGKILL))
            timer.daemon = True
            timer.start()


def check_whole(root: Path) -> None:
    """Assert that every checkpoint left by a crash is whole, and that the last completed step, or a later step, exists.

    Effects: reads every checkpoint.
    """
    last_completed = int((root / "known").read_text())
    paths = [path for path in sorted(root.iterdir()) if path.is_dir() and not path.suffix]
    # Without a folder, a save in progress had moved the checkpoint aside: `load` finds the checkpoint by its path.
    steps = [_step_of(path) for path in paths or [root / "only"]]
    assert max(steps) >= last_completed, f"step {last_completed} was saved, and only {sorted(steps)} are there"


def damage(path: Path, seed: int) -> str:
    """Flip a bit of one of a checkpoint's files, truncate or remove the file; return a description of the damage."""
    draw = random.Random(seed)
    file = draw.choice(sorted(child for child in path.iterdir() if child.is_file())) if path.is_dir() else path
    content = bytearray(file.read_bytes())
    at = draw.randrange(len(content))
    kind = draw.choice(["flip", "flip", "cut", "remove"])
    if kind == "remove":
        file.unlink()
    elif kind == "cut":
        file.write_bytes(content[:at])
    else:
        content[at] ^= 1 << draw.randrange(8)
        file.write_bytes(content)
    return f"{kind} {file.name} at {at}"


def check_never_silently_wrong(source: Path, scratch: Path, seed: int) -> bool:
    """Assert that a damaged copy is refused or loads the saved values; return True if refused.

    A format without checksums cannot detect a flipped bit of a tensor: `verify` must then report all bytes unverified.
    """
    if source.is_dir():
        shutil.copytree(source, scratch)
    else:
        shutil.copyfile(source, scratch)
    description = damage(scratch, seed)
    try:
        if not _holds_step_one(scratch):
            report = verify(scratch)
            assert report.num_unverified_bytes == report.num_bytes, description
            assert description.startswith("flip") and ".safetensors" in description, description
    except (CheckpointDamaged, CheckpointMismatch, FileNotFoundError):
        return True
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch)
        scratch.unlink(missing_ok=True)
    return False


FORMATS: Final = ("native", "hf", "torch", "fsdp_dtensor", "torch.save", "dcp.save")


def save_filled(path: Path, kind: str = "native") -> None:
    """Save a checkpoint of step 1, in one of lamella's formats or by torch."""
    model = _filled(1, sharded=False)
    match kind:
        case "native":
            save(path, model=model, extra={"step": 1})
        case "torch.save":
            torch.save({"model": model.state_dict(), "step": 1}, path)
        case "dcp.save":
            # In a forked rank: DCP uses a GPU if one is visible, and a process that has used CUDA cannot fork ranks.
            run_ranks(lambda: save_of_torch({"model": model.state_dict(), "step": 1}, checkpoint_id=path), 1)
        case "hf" | "torch" | "fsdp_dtensor":
            save(path.with_name("saved"), model=model, extra={"step": 1})
            # Names stay unchanged: `_filled` has no model family to translate names for.
            convert(path.with_name("saved"), path, to=kind, translate=lambda source: source)
            shutil.rmtree(path.with_name("saved"))


def save_without_room(path: Path, seed: int, *, in_background: bool) -> bool:
    """Save over a checkpoint of step 1 under a limit on file sizes too small for the save; return True if it failed.

    Effects: asserts that the checkpoint of step 1 is unchanged; sets RLIMIT_FSIZE of this process during the save.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    room = random.Random(seed).randrange(math.prod(_SHAPE) * 4)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        saver = AsyncSaver() if in_background else None
        model = _filled(2, sharded=False)
        if saver is None:
            save(path, model=model, extra={"step": 2})
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)  # The writer process, already started, keeps the limit.
            saver.save(path, model=model, extra={"step": 2})
            saver.close()
    except (OSError, CheckpointFailed):
        return _step_of(path) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return False


def _filled(value: float, *, sharded: bool) -> nn.Module:
    model = nn.Module()
    weight = torch.full(_SHAPE, float(value))
    if sharded:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])
    model.register_parameter("a", nn.Parameter(weight))
    model.register_parameter("b", nn.Parameter(torch.full((7,), float(value))))
    return model


def _holds_step_one(path: Path) -> bool:
    """True when every element of a checkpoint is 1, and the step is 1 in formats with a step."""
    model = _filled(-1, sharded=False)
    extra = load(path, model=model)
    return extra.get("step", 1) == 1 and all(bool(tensor.eq(1).all()) for tensor in model.parameters())


def _step_of(path: Path) -> int:
    """Return a checkpoint's step; assert that every element equals the step."""
    model = _filled(-1, sharded=False)
    while True:
        try:
            step = load(path, model=model)["step"]
            break
        except FileNotFoundError as error:  # A writer outlives its killed rank, and may replace files during a load.
            if "another checkpoint at its path" not in str(error):
                raise
    for name, tensor in model.named_parameters():
        assert bool(tensor.eq(step).all()), f"{name} of {path} is not all of step {step}"
    return int(step)


def _tell(file: Path, step: int) -> None:
    if dist.get_rank() == 0:
        temporary = file.with_suffix(".new")
        temporary.write_text(str(step))
        temporary.rename(file)
