"""The wind tunnel: stand-ins for an executor that check what they are told to do."""
