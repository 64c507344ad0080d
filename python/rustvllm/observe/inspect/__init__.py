"""Queries to a running engine, and their answers."""
