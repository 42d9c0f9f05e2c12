"""The APIs: what clients send, field by field, and what they are answered."""
