"""What can be seen of an engine that runs: metrics, traces, the times of its steps, and questions to it."""
