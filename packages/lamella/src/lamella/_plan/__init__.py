"""Step time and traffic of a run on a described cluster: works of a recorded step, priced and simulated."""
