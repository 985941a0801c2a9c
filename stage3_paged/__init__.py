"""Stage 3: the KV cache in fixed-size blocks, handed out on demand."""
