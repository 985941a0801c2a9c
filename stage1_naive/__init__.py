"""Stage 1: one request at a time, everything recomputed for every token."""
