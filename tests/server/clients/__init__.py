"""Official clients against our server: scripts that run in environments of their own, with the server's address."""
