"""Tests under mcore/ need a real megatron-core, which the session `megatron(cpu)` installs."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("megatron") else ["mcore"]
