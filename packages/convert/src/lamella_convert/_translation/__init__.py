"""Names and cuts of one convention in another's: rules are data, and hold both ways."""
