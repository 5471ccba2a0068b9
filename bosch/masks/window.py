"""What a window counts. Everything that takes one checks it here; a hybrid's folder has a copy."""

from bosch.run.errors import UserError

# What a group with a window sees of the text before it: nothing, or a constant key and value in the
# place of the first token (bosch/hybrid/sinks.py).
SINK_KINDS = ("none", "static")
WINDOW_CONVENTION = "query i sees key j if 0 <= i - j < window_tokens: the token itself counts"


def check_window(window_tokens: int) -> int:
    if isinstance(window_tokens, bool) or not isinstance(window_tokens, int) or window_tokens < 1:
        raise UserError(
            f"window is {window_tokens!r}; it must be 1 or more tokens, including the current one."
        )
    return window_tokens
