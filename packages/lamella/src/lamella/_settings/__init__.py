"""The settings of a run: their fields, bounds and command-line names, and the files that hold them."""
