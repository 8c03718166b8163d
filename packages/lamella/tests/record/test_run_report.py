"""The page on a run: one file that fetches nothing, with the run's numbers, settings and texts, all escaped."""

import json
import shutil
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from trained_runs import Run

from lamella._command.train import Result
from lamella._record.history import read_history, recorded_start
from lamella._record.report import report, reported_run, write_report
from lamella._record.run_directory import RunDirectory
from lamella.cli import main

VOID = {"circle", "line", "meta", "polyline", "rect"}
HOSTILE = "<script>alert(1)</script>&\"'"


class Outline(HTMLParser):
    """The elements of a page, its texts, and the curves; refuses elements that do not close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.attributes += attrs
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in VOID
        self.elements.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def has(self, text: str) -> bool:
        return any(text in part for part in self.texts)


def step_row(step: int, **fields: float) -> Mapping[str, object]:
    numbers = {"loss": 3.0 - step / 100, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_s": 1e5, "memory_nbytes": 2**30}
    return {"step": step, **numbers, "mfu": None, **fields}


def write_run(root: Path, rows: Sequence[Mapping[str, object]], model: str = "llama-small") -> RunDirectory:
    directory = RunDirectory(root)
    directory.model.mkdir(parents=True)
    directory.config.write_text(json.dumps({"model": {"name": model}, "optim": {"steps": 100, "lr": 1e-3}}))
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_the_page_of_a_finished_run_has_its_losses_and_is_written_again(
    trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.directory.root, root := tmp_path / "run")
    assert main(["report", str(root)]) == 0
    assert capsys.readouterr().out == f"report: {root / 'report.html'}\n"
    page = Outline((root / "report.html").read_text())
    assert page.has(f"{trained.losses[6]:.4g} nats/token") and page.has(f"{trained.nats_per_byte(6):.4g} nats/byte")
    assert page.elements.count("figure") == 6  # two losses, rate, gradient norm, throughput, memory
    assert {"--sequence-length", "--batch-size", f"lamella eval {root}"} <= {*page.texts} or page.has("lamella eval")


def test_the_throughput_of_two_steps_is_their_mean(tmp_path: Path) -> None:
    rows = [step_row(1, tokens_per_s=70.0), step_row(2, tokens_per_s=1100.0)]
    assert "585" in Outline(report(write_run(tmp_path / "run", rows))).texts


def test_memory_is_the_largest_and_utilization_the_median_of_all_steps(tmp_path: Path) -> None:
    sizes, shares = (2**31, 2**30, 2**30), (0.4, 0.5, 0.1)  # a run that was resumed with other options
    rows = [step_row(1 + i, memory_nbytes=sizes[i], mfu=shares[i]) for i in range(3)]
    assert {"2.00 GiB", "40.0%"} <= {*Outline(report(write_run(tmp_path / "run", rows))).texts}


def test_the_page_fetches_nothing_and_runs_no_script(tmp_path: Path) -> None:
    page = Outline(report(write_run(tmp_path / "run", [step_row(1), step_row(2)])))
    assert not {"script", "img", "link", "iframe"} & {*page.elements}
    assert not [text for name, text in page.attributes if name in ("src", "href", "style") or name.startswith("on")]
    assert dict(page.attributes)["lang"] == "en" and page.has("prefers-color-scheme: dark")


def test_names_and_texts_of_users_are_escaped(tmp_path: Path) -> None:
    rows = [step_row(1), {"step": 1, "prompt": HOSTILE, "text": HOSTILE}, {"step": 1, HOSTILE: 1.0}]
    rows.append({"step": 1, "nats_per_byte": 1.0, "name": HOSTILE})
    directory = write_run(tmp_path / HOSTILE.replace("/", ""), rows, model=HOSTILE)
    with pytest.raises(RuntimeError), recorded_start(directory.history, {"step": 0, "ranks": 2, "device": HOSTILE}):
        raise RuntimeError(HOSTILE)
    page = Outline(report(directory))
    assert "script" not in page.elements and page.texts.count(HOSTILE) >= 4
    assert page.has(f"validation on {HOSTILE}") and page.has(f"2 ranks on {HOSTILE}")


def test_several_held_out_sets_and_phases_have_a_curve_each(tmp_path: Path) -> None:
    rows: list[Mapping[str, object]] = []
    for step in range(1, 6):
        rows.append(step_row(step, forward_s=0.1, backward_s=0.2, optimizer_state_nbytes=2**20))
        rows += [{"step": step, "nats_per_token": 2.0, "name": name} for name in ("code", "prose")]
        rows.append({"step": step, "web/nats_per_token": 2.0})
    page = Outline(report(write_run(tmp_path / "run", rows)))
    for name in (
        "validation on code",
        "validation on prose",
        "validation on web",
        "forward",
        "backward",
        "optimizer state",
    ):
        assert name in page.texts
    assert page.elements.count("figure") == 6


def test_settings_that_differ_from_the_defaults_come_first(tmp_path: Path) -> None:
    page = Outline(report(write_run(tmp_path / "run", [])))
    start = page.texts.index("--steps")
    assert page.texts[start : start + 3] == ["--steps", "100", "500"]
    assert page.texts.index("--lr") < page.texts.index("All settings")
    assert "--batch-size" not in page.texts


def test_a_run_has_its_starts_and_ends_with_their_reasons(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_row(3)])
    facts = {"step": 0, "ranks": 2, "device": "cpu"}
    with pytest.raises(KeyboardInterrupt), reported_run(directory, facts, pytest.fail):
        raise KeyboardInterrupt("Stopped by SIGTERM.")
    assert "Stopped by SIGTERM. at step 3" in directory.report.read_text()
    with reported_run(directory, facts | {"step": 3}, pytest.fail):
        assert "in progress or killed" in report(directory)
    page = Outline(directory.report.read_text())
    events = [text for text in page.texts if text in ("start", "resume from step 3", "end")]
    assert events == ["start", "end", "resume from step 3", "end"] and page.has("complete at step 3")
    assert [event["event"] for event in read_history(directory.history)] == ["start", "end"] * 2


def test_a_profile_shows_its_largest_losses_and_its_tables(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_row(1)])
    directory.profile.mkdir()
    loss = {"name": "exposed gathers in forward", "ms": 0.125, "advice": "gather further ahead"}
    (directory.profile / "overlap.json").write_text(json.dumps({"verdict": "The verdict.", "losses": [loss]}))
    (directory.profile / "overlap.txt").write_text("unit  forward")
    page = Outline(report(directory))
    assert {"The verdict.", "exposed gathers in forward", "0.12", "unit  forward"} <= {*page.texts}
    assert ("href", "profile/overlap.html") in page.attributes


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}', "\0"])
def test_damaged_files_leave_their_sections_out(tmp_path: Path, damage: str) -> None:
    directory = write_run(tmp_path / "run", [])
    directory.profile.mkdir()
    for path in (directory.config, directory.metrics, directory.history, directory.profile / "overlap.json"):
        path.write_text(damage)
    (directory.profile / "overlap.txt").write_text("")
    assert Outline(report(directory)).has("Next")


@pytest.mark.parametrize("field", ["step", "loss", "memory_nbytes"])
def test_numbers_of_damaged_records_leave_the_page_alone(tmp_path: Path, field: str) -> None:
    directory = write_run(tmp_path / "run", [step_row(1), step_row(2)])
    expected = report(directory)
    with directory.metrics.open("a") as file:
        file.write(json.dumps({**step_row(3), field: 10**400}) + "\n")
    assert report(directory) == expected


def test_the_largest_numbers_are_left_out_of_curves(tmp_path: Path) -> None:
    rows = [step_row(1), step_row(2, loss=1e308, grad_norm=-1e308, tokens_per_s=1e308), step_row(3)]
    assert Outline(report(write_run(tmp_path / "run", rows))).has("steps")


def test_a_path_that_begins_with_a_dash_is_no_option_of_the_next_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = Outline(report(write_run(Path("-run"), [])))
    assert page.has("lamella export ./-run") and page.has("lamella train --config ./-run/config.json --run-dir ./-run")
    result = Result(checkpoint=Path(), plot=Path(), metrics=Path("-run/metrics.jsonl"), report=Path(), validations=())
    assert result.lines()[-1] == 'next: lamella export ./-run, or lamella generate ./-run "..."'


def test_a_path_that_is_no_utf_8_is_shown_escaped(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_row(1)])
    settings = json.loads(directory.config.read_text(encoding="utf-8"))
    settings["data"] = {"paths": [f"{HOSTILE}\udcff"]}
    directory.config.write_text(json.dumps(settings), encoding="utf-8")
    assert Outline(write_report(directory).read_text(encoding="utf-8")).texts.count(f"{HOSTILE}\\udcff") == 1


def test_a_page_that_cannot_be_written_leaves_the_run_alone(tmp_path: Path) -> None:
    directory = write_run(tmp_path / "run", [step_row(1)])
    directory.report.with_name("report.html.partial").mkdir()
    lines: list[str] = []
    with reported_run(directory, {}, lines.append):
        pass
    assert lines == [f"report: Is a directory: {directory.report}"]


@pytest.mark.parametrize("name", ["", "absent"])
def test_lamella_report_refuses_folders_without_a_run(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(tmp_path / name)]) == 2
    assert "Expected the folder of a run of `lamella train`" in capsys.readouterr().err
