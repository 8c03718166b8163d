"""Names and cuts of one convention in those of another: rules are data, and hold both ways."""
