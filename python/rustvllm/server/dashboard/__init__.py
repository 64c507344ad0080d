"""The live page at ``/dashboard``: what the engines do at this moment, and a playground; ``docs/dashboard.md``.

``routes.py`` has its endpoints, ``access.py`` says who may see them, ``page.py`` puts the page together; what it shows
comes from ``state_feed.py`` and ``journey_stream.py``.
"""
