"""The journey of each request as records: for the log, trace files, OpenTelemetry and the live page."""
