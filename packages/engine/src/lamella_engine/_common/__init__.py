"""Helpers below all units: errors, labels of profiles, nests of tensors, texts."""
