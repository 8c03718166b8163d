"""What all ranks of a training call: saves, loads, saves in the background."""
