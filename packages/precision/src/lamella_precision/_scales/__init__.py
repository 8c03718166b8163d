"""Blocks of a weight and their scales: tiles, the arithmetic of scales, and the encoding of cuts."""
