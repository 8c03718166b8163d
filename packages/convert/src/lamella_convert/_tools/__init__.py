"""Checkpoints converted, compared, listed and verified; a live model written as safetensors."""
