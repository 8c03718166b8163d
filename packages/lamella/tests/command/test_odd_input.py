"""Odd files and settings end a run before it starts, in one line that names the place, and with no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lamella.cli import main

TEXT = json.dumps({"text": "some words of a text " * 40})
MANY_DIGITS = "9" * 5000

Outcome = Callable[..., str]


class WorkersStartedError(Exception):
    """The run was accepted."""


@pytest.fixture
def refusal(options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Outcome:
    """Run the command in this process, up to the start of its workers; return the line of its refusal, else nothing."""

    def start_workers(*_: object, **__: object) -> None:
        raise WorkersStartedError

    monkeypatch.setattr("lamella._command.train.run_workers", start_workers)

    def refusal(*argv: str) -> str:
        try:
            code = main([*options, *argv])
        except WorkersStartedError:
            capsys.readouterr()
            return ""
        output = capsys.readouterr()
        assert code == 2 and output.out == ""
        assert output.err.startswith("lamella: error: Expected ") and output.err.count("\n") == 1
        assert len(output.err) < 800
        return output.err

    return refusal


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "cut \\ud83d here"}', "Expected whole characters in line 13 of "),
        ('{"messages": [{"role": "user", "content": "\\udcb2"}]}', "Expected whole characters in line 13 of "),
        ('{"text": "x", "meta": ' + "[" * 20_000 + "]" * 20_000 + "}", "line 13 of "),
        ('{"text": "x", "id": ' + MANY_DIGITS + "}", "got an integer of too many digits."),
        ('{"text": "cut in the mid', "got unterminated string starting at column 10."),
        ('{"text": "tab\there"}', "got invalid control character at column 14."),
        ('{"text": null}', "got null under 'text'."),
        ('{"text": 5, "id": 1}', "Expected a text under 'text' in line 13 of "),
        ('{"messages": null}', "got null under 'messages'."),
        ('{"messages": []}', "Expected a list of messages under 'messages' in line 13 of "),
        ('{"messages": "hello"}', "got a text."),
        ('{"prompt": "a", "answer": "b"}', "got the keys 'prompt', 'answer'."),
        ("{" + ", ".join(f'"key{index}": 1' for index in range(5000)) + "}", "and 4992 more."),
        ("[1, 2]", "got no object but a list."),
        ("null", "got no object but null."),
    ],
)
# The file is cut in two to validate on its end: the line lies in the first part, or in the second.
@pytest.mark.parametrize("num_later_lines", [0, 400])
def test_a_json_line_that_is_no_document_is_refused_by_its_number(
    refusal: Outcome, tmp_path: Path, line: str, expected: str, num_later_lines: int
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join([*[TEXT] * 12, line, *[TEXT] * num_later_lines]) + "\n", encoding="utf-8")
    error = refusal("--data", str(path), "--validation-fraction", "0.2")
    assert expected in error and f"in line 13 of {str(path)!r}" in error and " line 1," not in error


@pytest.mark.parametrize(
    "content",
    [
        "\ufeff" + "\r\n\r\n".join([TEXT] * 12) + "\r\n  \r\n",
        "\n".join([TEXT] * 12 + ['{"text": "pair \\ud83d\\ude00"}', '{"text": "half", "meta": "\\ud83d"}']),
        "\n".join([TEXT] * 12 + ['{"text": ""}', '{"text": "x", "score": NaN}']),
        "\n".join([TEXT.replace("}", ', "messages": null}')] * 12),
        "\n".join([TEXT] * 12 + [json.dumps({"text": "a\u2028b\u2029c\x85d"}, ensure_ascii=False)]),
    ],
)
def test_json_lines_with_a_mark_empty_lines_and_unused_values_are_trained_on(
    refusal: Outcome, tmp_path: Path, content: str
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(content.encode())
    assert refusal("--data", str(path)) == ""


def test_a_document_of_one_line_is_not_cut(refusal: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps([{"text": "some words"}] * 12), encoding="utf-8")
    assert "in line 1 of" in (error := refusal("--data", str(path))) and "got no object but a list." in error
    path.write_text(TEXT, encoding="utf-8")
    assert "tokens to validate on, got 0." in refusal("--data", str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = " + "[" * 20_000 + "]" * 20_000, "got values that are nested too deeply."),
        ("[optim]\nsteps = " + MANY_DIGITS, "got an integer of too many digits."),
        ("[optim]\neps = " + "9" * 400, "Expected --eps of at most 9223372036854775807, got 999"),
        ('[parallel]\nfloat8_except = ["a\\u0000b"]', "Expected --float8-except without NUL characters, got ('a"),
        ("[parallel]\nfloat8_except = [[1]]", "Expected --float8-except to be a list of texts"),
        ("[optim]\nlr = 1979-05-27", "Expected --lr to be a number, got datetime.date(1979, 5, 27)."),
        ("[optim]\nlr = inf", "Expected --lr to be a finite number above 0, got inf."),
        ("[[optim]]\nsteps = 1", "Expected a table [optim] in "),
        ("[optim]\nlr = 1\nlr = 2", "Cannot overwrite a value"),
        ("[optim]\n" + "k" * 10_000 + " = 1", "Expected a field of [optim] in "),
    ],
)
def test_toml_that_is_odd_is_refused(refusal: Outcome, tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    assert expected in refusal("--config", str(path))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[" * 20_000, "got values that are nested too deeply."),
        (b'{"optim": {"lr": 1, "lr": 2}}', "got the key 'lr' twice."),
        (b'{"optim": {"lr": NaN}}', "Expected --lr to be a finite number above 0, got nan."),
        (b'{"optim": {"lr": {}}}', "Expected --lr to be a number, got {}."),
        (b'{"optim": null}', "Expected a table [optim] in "),
        (b"[]", "Expected groups of settings in "),
        (b"\xff", "can't decode byte 0xff in position 0"),
        (b"", "expecting value at line 1, column 1."),
    ],
)
def test_json_settings_that_are_odd_are_refused(
    refusal: Outcome, tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(content)
    assert expected in refusal("--config", str(path))


def test_settings_may_begin_with_a_mark_and_end_lines_as_windows_does(refusal: Outcome, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[optim]\r\nlr = 0.001\r\n")
    assert refusal("--config", str(path)) == ""


@pytest.mark.parametrize("option", ["--steps", "--lr", "--seed", "--threads", "--ranks", "--timeout", "--batch-size"])
@pytest.mark.parametrize("value", ["1e400", "9" * 400, MANY_DIGITS, "-1", "nan", ""])
def test_numbers_that_are_huge_negative_or_none_are_refused_by_the_option(
    refusal: Outcome, option: str, value: str
) -> None:
    assert f"Expected {option} " in refusal(option, value)


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--ranks", "100000", "--batch-size", "100000"], "Expected at most 64 ranks for each of the "),
        (["--batch-size", "10000000000"], "of at most 1,073,741,824 tokens in a step"),
        (
            ["--vocab-size", "10000000000000"],
            "Expected a model whose fresh weights fit into the memory of this machine",
        ),
    ],
)
def test_sizes_that_no_machine_has_are_refused(refusal: Outcome, argv: list[str], expected: str) -> None:
    assert expected in refusal(*argv)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_hidden_layers": 10**9}, "Expected 'num_hidden_layers' of at most 10000 in "),
        ({"model_type": "mixtral", "num_local_experts": 10**9}, "Expected 'num_local_experts' of at most 10000 in "),
        ({"hidden_size": 10**9}, "Expected a model whose fresh weights fit into the memory of this machine"),
        ({"hidden_size": 10**30}, "Expected 'hidden_size' of at most 9223372036854775807 in "),
        ({"hidden_size": -16}, "Expected "),
        ({"num_attention_heads": 0}, "Expected "),
        ({"num_key_value_heads": "x"}, "Expected a config that transformers accepts in "),
        ({"intermediate_size": 1.5}, "Expected a config that transformers accepts in "),
        ({"attention_dropout": -1}, "Expected 'attention_dropout' from 0 to 1 in "),
        ({"hidden_act": "nonesuch"}, "Expected a causal language model that transformers can build"),
        ({"text_config": [1] * 1000}, "Expected a text_config with a model_type in "),
    ],
)
def test_a_model_config_with_an_odd_number_is_refused_at_once(
    refusal: Outcome, model_file: Path, changes: dict[str, object], expected: str
) -> None:
    model_file.write_text(json.dumps(json.loads(model_file.read_text()) | changes))
    assert expected in refusal()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b'{"model_type": "llama", "a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
            "got values that are nested too deep",
        ),
        (
            b'{"model_type": "llama", "hidden_size": ' + MANY_DIGITS.encode() + b"}",
            "got an integer of too many digits.",
        ),
        (b'{"model_type": "llama", "model_type": "mixtral"}', "got the key 'model_type' twice."),
        (b"\xff", "Expected a transformers config in "),
        (b'{"model": {}, "optim": {}, "run": {}}', "It holds the settings of a run of lamella train: `lamella export "),
    ],
)
def test_a_model_file_that_is_odd_is_refused(refusal: Outcome, model_file: Path, content: bytes, expected: str) -> None:
    model_file.write_bytes(content)
    assert expected in refusal()


def test_a_checkpoint_is_no_model(refusal: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "step_00000002"
    folder.mkdir()
    (folder / ".metadata").touch()
    assert f"got the checkpoint {str(folder)!r}. Write the model of a run by `lamella export" in refusal(
        "--model", str(folder)
    )


@pytest.mark.parametrize("option", ["--model", "--data", "--config", "--run-dir"])
@pytest.mark.parametrize("kind", ["pipe", "device", "loop", "long"])
def test_a_path_that_no_file_or_folder_is_at_is_refused_and_not_waited_for(
    refusal: Outcome, tmp_path: Path, option: str, kind: str
) -> None:
    paths = {"pipe": tmp_path / "pipe", "device": Path("/dev/zero"), "loop": tmp_path / "loop"}
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refusal(option, str(paths.get(kind, tmp_path / ("x" * 300))))


def test_names_that_are_not_utf_8_are_read_and_not_written(refusal: Outcome, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    for name in (b"\xff.txt", b"a.txt"):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_text("some words " * 2000, encoding="utf-8")
    assert refusal("--data", str(folder)) == ""
    assert "Expected a --run-dir whose name is UTF-8" in refusal("--run-dir", os.fsdecode(b"\xff"))


@pytest.mark.parametrize("command", [["eval", "run"], ["ckpt", "verify", "a"], ["ckpt", "diff", "a", "b"]])
@pytest.mark.parametrize(("to", "got"), [("absent/x.json", "without the folder 'absent'"), (".", "a folder")])
def test_a_file_of_json_without_a_folder_is_refused_before_the_report_is_made(
    capsys: pytest.CaptureFixture[str], command: list[str], to: str, got: str
) -> None:
    assert main([*command, "--json", to]) == 2
    expected = f"lamella: error: Expected a file to write to as --json, in a folder that exists, got {to!r}, {got}.\n"
    assert capsys.readouterr() == ("", expected)
