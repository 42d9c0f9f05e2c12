"""The engine's process, and what travels to it and back."""
