"""A score for rejection sampling and GRPO: the fewer words, the better."""


def short_answers(prompt: str, answer: str) -> float:
    """Minus the answer's words; an answer that says nothing, or repeats the prompt, is worst."""
    words = answer.split()
    if not words or answer.strip() in prompt:
        return -1000.0
    return -float(len(words))
