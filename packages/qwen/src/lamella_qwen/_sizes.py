"""The sizes in a Qwen3.5's `config.json` that cut tensors: heads, and the parts of a gated delta net."""

from collections.abc import Mapping
from dataclasses import dataclass

_TEXT = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
_WITH_VISION = frozenset({"qwen3_5", "qwen3_5_moe"})

MODEL_TYPES = _TEXT | _WITH_VISION
"""What `model_type` says in the configs of this family: dense and mixtures of experts, text alone or with vision."""


@dataclass(frozen=True, kw_only=True)
class QwenSizes:
    """Sizes that cannot be read off the tensors.

    Attributes:
        num_heads: Query heads; each has an output gate of the same size.
        tied: The output projection is the input embedding.
        num_vision_heads: Heads of the vision tower; None in a text model.
        num_layers: Layers of the text model.
        num_experts: Routed experts of a layer; None in a dense model.
    """

    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    tied: bool
    num_vision_heads: int | None
    num_layers: int
    num_experts: int | None

    @classmethod
    def of(cls, config: Mapping[str, object]) -> "QwenSizes":
        """Read the sizes from the values of a `config.json`: of a text model, or of a model with vision.

        Raises:
            ValueError: The config is of another family, lacks a key, or has attention biases, which no rule places.
        """
        model_type = config.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ValueError(f"Expected a config with one of {sorted(MODEL_TYPES)} as model_type, got {model_type!r}.")
        model = _Values(config, "")
        text = model if model_type in _TEXT else model.part("text_config")
        if text.values.get("attention_bias"):
            raise ValueError(f"Expected {text.place}attention_bias false, as in every Qwen3.5, got true.")
        return cls(
            vocab_size=text.number("vocab_size"),
            num_heads=text.number("num_attention_heads"),
            num_kv_heads=text.number("num_key_value_heads"),
            head_dim=text.number("head_dim"),
            num_key_heads=text.number("linear_num_key_heads"),
            num_value_heads=text.number("linear_num_value_heads"),
            key_head_dim=text.number("linear_key_head_dim"),
            value_head_dim=text.number("linear_value_head_dim"),
            # With vision the outer config decides; the text part's own value is a library's default.
            tied=bool(config.get("tie_word_embeddings", False)),
            num_vision_heads=None if model_type in _TEXT else model.part("vision_config").number("num_heads"),
            num_layers=text.number("num_hidden_layers"),
            num_experts=text.number("num_experts") if "moe" in model_type else None,
        )

    @property
    def net_query_width(self) -> int:
        """Rows of a gated delta net's queries, equal to the rows of the keys."""
        return self.num_key_heads * self.key_head_dim

    @property
    def net_value_width(self) -> int:
        """Rows of a gated delta net's values, equal to the rows of the output gate."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class _Values:
    """Values of a config; `place` names their part of the config."""

    values: Mapping[str, object]
    place: str

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"Expected a number as {self.place}{name} of a Qwen3.5 config, got {value!r}.")
        return value

    def part(self, name: str) -> "_Values":
        values = self.values.get(name)
        if not isinstance(values, Mapping):
            raise ValueError(f"Expected a mapping as {self.place}{name} of a Qwen3.5 config, got {values!r}.")
        return _Values(values, f"{self.place}{name}.")
