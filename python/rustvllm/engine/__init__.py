"""The engine: the main loop, who drives it, and the way in and out of it for a request."""
