"""What a request passes on its way to an endpoint: HTTP itself, guards, ids, logs."""
