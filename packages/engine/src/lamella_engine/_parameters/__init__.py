"""Groups of parameters communicated together, and their places on the mesh."""
