"""A run from its checked settings to its last checkpoint: preparation, steps, validation, saves, resumption."""
