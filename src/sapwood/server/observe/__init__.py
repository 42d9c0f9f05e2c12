"""What is told about requests: metrics, logs, records."""
