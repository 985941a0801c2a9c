"""Stage 6: the same engine behind the OpenAI API."""
