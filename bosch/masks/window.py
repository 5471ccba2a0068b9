"""What a window counts, and which layers of a model have one of their own. Everything that takes a
window checks it here; a hybrid's folder has a copy."""

from typing import Any

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


def own_window(config: Any, layer: int) -> int | None:
    """The window that a layer of a model has of its own, whatever mask is chosen; None: full
    attention. `config`: of transformers."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None or kinds[layer] == "full_attention":
        return None
    return int(config.sliding_window)


def full_layers(config: Any) -> list[int]:
    """The layers that are a mask's, in its order: those without a window of their own."""
    return [n for n in range(config.num_hidden_layers) if own_window(config, n) is None]


def own_windows(config: Any) -> tuple[int, ...]:
    """The windows of the other layers."""
    windows = (own_window(config, n) for n in range(config.num_hidden_layers))
    return tuple(window for window in windows if window is not None)


def spare_tokens(num_held: int) -> int:
    """The room for further tokens that our dynamic cache allocates beside those it holds, so that
    not every new token moves them all: a block, or an eighth."""
    return max(16, num_held // 8)
