"""A few short prompts for tests that need text and not a benchmark."""

PROMPTS = (
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Tom has 3 apples and buys 5 more. How many apples does Tom have?",
    "Translate to German: Good morning, my friend.",
    "The three primary colours are red,",
    "List the planets of the solar system in order:",
    "Once upon a time, in a small village by a river,",
)
