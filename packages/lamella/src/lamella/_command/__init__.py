"""The verbs of the command line, and the parser of their options."""
