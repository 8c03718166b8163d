"""Property tests draw the same examples in every run: a red run is red again."""

from hypothesis import settings

settings.register_profile("lamella", derandomize=True, deadline=None, max_examples=60)
settings.load_profile("lamella")
