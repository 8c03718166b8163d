"""Linear layers that multiply gathered float8 data as it is: operands, kernels, devices."""
