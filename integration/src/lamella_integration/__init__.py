"""Reference models, backends to compare with, benchmarks, and the profile as a proof of zero-copy."""
