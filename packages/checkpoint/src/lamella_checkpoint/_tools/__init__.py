"""What one process does with checkpoints, without a model."""
