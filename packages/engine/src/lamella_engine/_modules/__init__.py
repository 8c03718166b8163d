"""The module side of a unit: state, hooks, handles, and FSDP2's private names."""
