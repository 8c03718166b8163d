"""The memory of a run before it starts: a step on tensors without memory, on ranks that do not exist."""
