"""Token counts of real conversations (counts only, no text): 2,000 (prompt, reply) pairs from ShareGPT.

Tokenised with SmolLM2's tokenizer; vLLM's benchmark filter: 4 <= each, prompt <= 1024, sum <= 2048.
"""
