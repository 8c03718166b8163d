"""The ranks of a run as processes: started, placed, watched, stopped, locked, and in agreement."""
