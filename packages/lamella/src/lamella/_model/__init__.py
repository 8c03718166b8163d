"""The model that a run trains: its config, its weights, kernels and number formats, and how it is sharded."""
