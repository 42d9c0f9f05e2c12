"""The server: two processes, one speaks HTTP and one runs the model. Importing this package imports nothing heavy."""
