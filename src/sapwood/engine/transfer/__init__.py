"""Pages between device, host and store."""
