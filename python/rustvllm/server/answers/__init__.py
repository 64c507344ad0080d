"""Parts of an answer: log-probabilities, token counts, times, the echo of a prompt."""
