"""The chats of `sixstage demo`: what people ask, short and long answers mixed in order of arrival."""

PROMPTS = (
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Is 17 a prime number? Answer yes or no.",
    "Explain how a bicycle stays upright.",
    "Translate to Spanish: Good morning, my friend.",
    "Give me three tips for sleeping better.",
    "What is 12 + 30?",
    "Tell me a story about a robot who learns to cook.",
    "Who wrote Romeo and Juliet?",
    "How do I make pancakes?",
    "Name a fruit that is yellow.",
    "Write an email that asks my landlord to repair the heating.",
    "What colour do you get when you mix blue and yellow?",
    "Why is the sky blue?",
    "Say hello in one word.",
    "What is the difference between a list and a tuple in Python?",
)
