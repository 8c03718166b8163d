"""Reference models, backends to measure against, the benchmark, and the profile that proves zero-copy."""
