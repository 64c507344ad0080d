"""Images on their way from a caller to the engine: decoded, made into tiles, and given their tokens in the prompt."""
