"""Which parameters a recipe serves, and which dtypes the others have."""
