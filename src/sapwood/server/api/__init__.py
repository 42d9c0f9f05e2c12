"""The APIs: the fields of their requests, and their answers."""
