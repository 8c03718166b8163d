"""Archives of torch and DCP's metadata: places of tensors and objects in files."""
