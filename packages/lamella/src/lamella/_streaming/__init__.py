"""Training text that is read as the run goes: windows of documents, their sequences, and the scatter to the ranks."""
