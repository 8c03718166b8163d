"""One unit: its parameters, their weights and gradients."""
