"""The objects that megatron-core's training loop asks for: the wrapper and its optimizers."""
