"""The engine: the main loop, what drives it, and the way in and out of it for a request."""
