"""Boxes, names, errors, pickles read as data and files read safely: parts for every format."""
