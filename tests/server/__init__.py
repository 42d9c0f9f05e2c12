"""The server and what talks to it."""
