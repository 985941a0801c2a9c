"""One script per engine, started by its path with the Python of the engine's own environment."""
