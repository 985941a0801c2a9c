"""The decoder, its weights and where they come from."""
