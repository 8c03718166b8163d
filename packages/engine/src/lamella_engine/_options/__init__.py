"""The choices of a caller: options, placements, policies."""
