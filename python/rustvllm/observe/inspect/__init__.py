"""Questions to an engine that runs, and their answers."""
