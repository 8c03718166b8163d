"""Each format as a `Source`, and what writes it."""
