"""Expert-parallel overlap: a model's layers in the slots of a schedule, and its forward in segments."""
