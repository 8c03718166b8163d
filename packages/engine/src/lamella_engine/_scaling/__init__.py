"""Scales of number formats: measured by all ranks together, ahead of the gathers that encode weights with them."""
