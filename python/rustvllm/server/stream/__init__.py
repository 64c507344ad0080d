"""Generation for one HTTP request, and the events of its stream."""
