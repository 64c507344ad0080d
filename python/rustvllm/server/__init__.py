"""The OpenAI-compatible HTTP server: ``launch/serve.py`` runs it, ``app.py`` lists its endpoints."""
