"""What formats, rules and live models agree on: sources, boxes, safe reading of small files, errors."""
