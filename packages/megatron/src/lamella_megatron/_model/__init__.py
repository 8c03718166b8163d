"""A model and its parameters: meshes, units, patterns of layers, options, and sharding in one call."""
