"""The numbers that engines count, under vLLM's names: for Prometheus, the log and callers."""
