"""What a run writes and prints: its folder, metrics, plots, progress, measurements and profiles."""
