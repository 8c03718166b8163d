"""Reports on a sharded model: text, norms, non-finite values."""
