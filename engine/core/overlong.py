"""Overlong shaping: responses that come close to the length limit cost reward. Pure.

Source: DAPO, arXiv 2503.14476, section 3.4, equation 13. Deviation: none; a response cut at the limit pays all of it.
"""


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, factor: float) -> float:
    """min(0, -(length - (L_max - c)) / c · f); 0 without a buffer.

    Example: L_max 100, c 20, f 1: 80 tokens 0, 90 tokens -0.5, 100 tokens -1.

    Args:
        num_tokens: Response tokens, 0 to `max_tokens`.
        max_tokens: L_max, >= 1.
        buffer_tokens: c, 0 to `max_tokens`; 0 = no shaping.
        factor: f, > 0.
    """
    if not buffer_tokens:
        return 0.0
    return min(0.0, (max_tokens - buffer_tokens - num_tokens) / buffer_tokens * factor)
