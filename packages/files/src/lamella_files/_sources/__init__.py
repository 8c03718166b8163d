"""Sources of named tensors: read, renamed, streamed, and related to live tensors."""
