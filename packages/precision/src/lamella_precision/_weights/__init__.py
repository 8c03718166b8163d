"""Gathered weights of a recipe as tensors: quantised, dequantised where read, and their views."""
