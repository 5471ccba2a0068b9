"""What a window counts. Everything that takes one checks it here; a hybrid's folder has a copy."""

from bosch.run.errors import UserError

WINDOW_CONVENTION = "query i sees key j if 0 <= i - j < window_tokens: the token itself counts"


def check_window(window_tokens: int, num_first: int = 0) -> int:
    """`num_first`: S of the sink tokens=S beside it."""
    # True is an int in Python, and would be a window of one token.
    if isinstance(window_tokens, bool) or not isinstance(window_tokens, int) or window_tokens < 1:
        raise UserError(
            f"window is {window_tokens!r}; it must be 1 or more tokens, including the current one."
        )
    if num_first > window_tokens:
        raise UserError(
            f"sink tokens={num_first} keeps more than the window of {window_tokens}; keep at most "
            "as many tokens as the window has, or widen it."
        )
    return window_tokens


def spare_tokens(num_held: int) -> int:
    """The room for further tokens that our dynamic cache allocates beside those it holds, so that
    not every new token moves them all: a block, or an eighth."""
    return max(16, num_held // 8)
