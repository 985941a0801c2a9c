"""Stage 5: equal blocks are held once: prefixes, parallel samples and beams, by copy-on-write."""
