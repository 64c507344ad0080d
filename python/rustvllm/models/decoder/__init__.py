"""Building blocks that decoders of several model families share."""
