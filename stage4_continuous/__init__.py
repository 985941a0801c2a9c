"""Stage 4: the batch is decided anew at every step."""
