"""Collective calls of a training: saves, loads, saves in the background."""
