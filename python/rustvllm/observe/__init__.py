"""Observes a running engine: metrics, traces, the times of its steps, and queries."""
