"""Readers of units' state, logs of collectives, and streams without a device."""
