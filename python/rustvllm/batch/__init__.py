"""Files of requests, answered without a server: ``rustvllm run-batch``."""
