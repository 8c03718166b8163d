"""The formats themselves: how main weights become payloads, and payloads become weights."""
