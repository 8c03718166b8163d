"""Common ground of formats, rules and live models: sources, boxes, safe reading of small files, errors."""
