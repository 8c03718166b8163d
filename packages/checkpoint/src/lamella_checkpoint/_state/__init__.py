"""A live model's and optimizer's state on this rank: names, and places in the global tensors."""
