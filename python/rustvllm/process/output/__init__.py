"""The output of a serving process: writing never waits for a reader, and never fails if the reader is gone."""
