"""DTensors whose ranks own any number of rows."""
