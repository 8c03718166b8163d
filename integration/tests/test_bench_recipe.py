"""The benchmark of the recipe: `lamella train` and its peers have the same losses, on CPU ranks too."""

import json
from pathlib import Path

import pytest

from lamella_integration.bench_recipe import main

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow  # five programs
@pytest.mark.parametrize("trained", ["", "--lora-rank 4"], ids=["all weights", "adapters"])
def test_the_trainer_has_the_losses_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (tmp_path / "text.txt").write_text("Thin layers of shards.\n\n" * 4000, encoding="utf-8")
    text = f"--vocab-size 512 --sequence-length 64 --data {tmp_path / 'text.txt'}"
    lamella = f"lamella --device cpu --precision bf16 --lr 2e-3 {text} {trained}"
    steps = ["--steps", "8", "--num-skipped", "4", "--batch-size", "4"]
    model = ["--model", str(tmp_path / "config.json"), "--out", str(tmp_path / "rows.json")]
    peers = ["trainer"] if trained else ["trainer", "loop"]  # the loop knows no adapters
    monkeypatch.setattr("sys.argv", ["bench_recipe", *model, *steps, lamella, *peers])
    main()
    run, *others = json.loads((tmp_path / "rows.json").read_text(encoding="utf-8"))
    assert [other["variant"] for other in others] == peers
    for other in others:
        assert other["losses"] == pytest.approx(run["losses"], rel=1e-3)
    assert run["losses"][-1] < run["losses"][0]
