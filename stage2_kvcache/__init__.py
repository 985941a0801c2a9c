"""Stage 2: a contiguous KV reservation per request, and static batches."""
