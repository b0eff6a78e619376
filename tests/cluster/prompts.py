"""Twenty varied prompts for the default model."""

from __future__ import annotations

from pd_cluster.model.tokenizer import Tokenizer

CHATS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain why the sky is blue to a child.",
    "List three uses of copper.",
    "Translate 'good morning' into Spanish and German.",
    "A train leaves at 9:40 and arrives at 12:05. How long is the journey?",
    "Summarise the plot of Romeo and Juliet in two sentences.",
    "Give me a recipe for pancakes. 🥞",
]
TEXTS = [
    "Once upon a time, in a village at the edge of a dark forest, there lived",
    "The three laws of thermodynamics are",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\n# Solve a linear system with Gaussian elimination\ndef solve(a, b):\n",
    "SELECT name, COUNT(*) FROM orders WHERE",
    '{"name": "pd-cluster", "version": "0.1.0", "dependencies": {',
    "从前有座山，山里有座庙，庙里有个老和尚",
    "北京是中国的首都，",
    "1, 1, 2, 3, 5, 8, 13,",
    "The quick brown fox jumps over the lazy dog. " * 12,
]
LONG_TOKENS = 3000


def varied_prompts(tokenizer: Tokenizer) -> list[list[int]]:
    """Chat, code, Chinese, numbers, one of 3,000 tokens and one of a single token."""
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in CHATS]
    texts = [tokenizer.encode(text) for text in TEXTS]
    lines = "".join(
        f"Entry {number}: the keeper counted {number * 7 % 23} ships and wrote it down.\n"
        for number in range(400)
    )
    long = tokenizer.encode(lines)[:LONG_TOKENS]
    assert len(long) == LONG_TOKENS
    return [*chats, *texts, long, tokenizer.encode("Hello")[:1]]
