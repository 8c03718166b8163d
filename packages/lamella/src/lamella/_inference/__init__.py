"""Trained models put to use in one process: texts generated, losses on texts, tasks."""
