"""`--kernels`: the libraries of fused kernels that a run may ask for."""

from lamella._settings.options import ConfigError
from lamella._settings.sections import ModelConfig, ParallelConfig
from lamella_transformers import has_kernels, has_liger


def check_kernels(model: ModelConfig, model_type: str, parallel: ParallelConfig) -> None:
    """Refuse kernels that are not installed, or that neither the device nor the model type has.

    Raises:
        ConfigError: Names the option and the way out.
    """
    if model.kernels == "none":
        return
    if parallel.compile:
        raise ConfigError(
            f"Expected --kernels {model.kernels} without --compile, whose inductor fuses the layers itself, got both. "
            "Leave one of them out."
        )
    if parallel.device != "cuda":
        raise ConfigError(
            f"Expected --device cuda for --kernels {model.kernels}, got {parallel.device!r}. Pass --kernels none."
        )
    if not has_liger():
        raise ConfigError(
            "Expected liger-kernel to be installed for --kernels liger, got none. Pass --kernels none, or install it "
            "from a clone: uv pip install './packages/lamella[kernels]'"
        )
    if not has_kernels(model_type):
        raise ConfigError(
            f"Expected a model type that Liger has kernels for with --kernels liger, got {model_type!r}. Pass "
            f"--kernels none."
        )
