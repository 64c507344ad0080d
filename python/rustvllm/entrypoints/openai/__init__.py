"""The OpenAI-compatible HTTP server.

``server.py`` runs it, ``app.py`` lists the endpoints, ``errors.py`` is the only module that knows HTTP status codes.
"""
