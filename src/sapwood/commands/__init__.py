"""Commands that need neither an engine nor a server of their own: a chat, the simulator, shell completion."""
