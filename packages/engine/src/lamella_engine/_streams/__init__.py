"""State shared by the units of a tree while they run: streams, the phase of the step, the check of the order."""
