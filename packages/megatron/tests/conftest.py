"""Tests under mcore/ need a real megatron-core, which only the `megatron` session installs."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("megatron") else ["mcore"]
