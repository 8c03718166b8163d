"""Property tests draw the same examples in every run: a red run is red again."""

import torch._dynamo  # noqa: F401  # once here, not for seconds in every forked rank: every optimizer imports it
from hypothesis import settings

settings.register_profile("lamella", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lamella")
