"""Clients of an engine, one for each place where it runs: a front end sends requests through them, asks and stops it.

``inproc``: the engine runs when its caller steps it. ``thread``: in a thread of this process. ``process``: in a process
that the client starts. ``remote``: in processes that something else started. ``interface`` says what all of them have,
and ``choice`` makes one for a front end that was given none.
"""
