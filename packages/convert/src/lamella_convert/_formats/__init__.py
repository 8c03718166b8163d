"""Each format as a `Source`, and its writer."""
