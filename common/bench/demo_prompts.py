"""The chats of `sixstage demo`: short and long answers mixed, in order of arrival."""

PROMPTS = (
    "What is the capital of France?",
    "How do plants drink water?",
    "What is the chemical symbol for water?",
    "What does CPU stand for?",
    "What is photosynthesis, in one sentence?",
    "How many days are in a week?",
    "Which animal is the fastest on land?",
    "What is 2 + 2?",
    "Who was the first person to walk on the Moon?",
    "Give me a title for a book about a lost dog.",
    "Why is the sky blue?",
    "What is the first month of the year?",
    "Summarize in one sentence: The cat sat on the mat because it was warm.",
    "What is H2O?",
    "What is the currency of the United Kingdom?",
    "What is the plural of mouse?",
)
