"""Processes of one server: how they are started, watched and ended, and what they tell each other."""
