"""What is shown of requests: metrics, logs, recorded traces."""
