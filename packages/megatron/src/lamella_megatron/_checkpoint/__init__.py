"""Checkpoints of a live model: global tensors and optimizer state under names free of ranks and stages."""
