"""The files of `examples` are whole: shells and parsers read them, and each option in them exists."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

from lamella._command.parser import parse

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SLURM, KUBERNETES, DOCKER = EXAMPLES / "slurm.sbatch", EXAMPLES / "kubernetes.yaml", EXAMPLES / "Dockerfile"
PAGE = ROOT / "docs" / "how-to" / "train-on-many-hosts.md"


def torchrun_line(text: str) -> list[str]:
    """Return the arguments of the first torchrun in a shell's text, without line continuations."""
    [line] = re.findall(r"\btorchrun (.*)", text.replace("\\\n", " "))[:1]
    return shlex.split(re.sub(r"\$\{?\w+\}?", "1", line))


def kubernetes() -> list[dict[str, object]]:
    return list(yaml.safe_load_all(KUBERNETES.read_text(encoding="utf-8")))


def container() -> dict[str, list[str]]:
    [job] = [document for document in kubernetes() if document["kind"] == "Job"]
    [container] = job["spec"]["template"]["spec"]["containers"]  # type: ignore[index]
    return container  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["slurm", "kubernetes", "page"])
def test_torchrun_and_lamella_options_in_the_launch_examples_exist(name: str) -> None:
    texts = {"slurm": SLURM.read_text, "kubernetes": lambda: container()["command"][-1], "page": PAGE.read_text}
    arguments = torchrun_line(texts[name]())
    launcher = get_args_parser().parse_args(arguments)
    assert launcher.module and launcher.training_script == "lamella"
    assert launcher.max_restarts == 3 and launcher.rdzv_backend == "c10d"
    assert parse(launcher.training_script_args).command == "train"


def test_the_batch_file_is_a_script_with_options_before_its_commands() -> None:
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text(encoding="utf-8")
    options, _, commands = text.partition("\nset -euo pipefail\n")
    assert "#SBATCH --nodes=2" in options and "#SBATCH" not in commands  # Slurm reads none after a command.


def test_kubernetes_pods_find_peers_by_the_service_and_mount_all_volumes() -> None:
    service, job = kubernetes()
    name = service["metadata"]["name"]  # type: ignore[index]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}  # type: ignore[index]
    pod = job["spec"]["template"]["spec"]  # type: ignore[index]
    assert pod["subdomain"] == name and f"-0.{name}:" in container()["command"][-1]
    assert {mount["name"] for mount in container()["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}  # type: ignore[index]


def test_the_image_copies_folders_that_exist() -> None:
    instructions = [line.split() for line in DOCKER.read_text(encoding="utf-8").splitlines() if line[:1].isupper()]
    assert {words[0] for words in instructions} == {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "CMD"}
    for words in instructions:
        assert words[0] != "COPY" or (ROOT / words[1]).is_dir()
