"""What a live model and its optimizer hold on this rank, under which names and where in the whole."""
