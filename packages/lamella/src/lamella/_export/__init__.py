"""Trained models in the form that other programs open: Hugging Face folders with their model cards."""
