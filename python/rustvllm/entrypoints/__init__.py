"""Ways to use the engine: the class ``LLM``, the command line and the HTTP server."""
