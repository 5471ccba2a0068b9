"""What a window counts. Everything that takes one checks it here; a hybrid's folder has a copy."""

from bosch.run.errors import UserError

# What a group with a window sees of the text before it (bosch/hybrid/sinks.py). none: nothing.
# static: a constant key and value in the place of the first token. tokens=S: the first S tokens.
SINKS = "none, static or tokens=S"
WINDOW_CONVENTION = "query i sees key j if 0 <= i - j < window_tokens: the token itself counts"


def check_window(window_tokens: int) -> int:
    if isinstance(window_tokens, bool) or not isinstance(window_tokens, int) or window_tokens < 1:
        raise UserError(
            f"window is {window_tokens!r}; it must be 1 or more tokens, including the current one."
        )
    return window_tokens


def spare_tokens(num_held: int) -> int:
    """The room for further tokens that our dynamic cache allocates beside those it holds, so that
    not every new token moves them all: a block, or an eighth."""
    return max(16, num_held // 8)


def sink_tokens(sink: object, window_tokens: int | None = None) -> int:
    """The first tokens that a sink keeps: S of `tokens=S`, else 0. Refuses what is no sink."""
    if sink in ("none", "static"):
        return 0
    kind, _, number = sink.partition("=") if isinstance(sink, str) else ("", "", "")
    if kind != "tokens" or not number.isdecimal() or not int(number):
        raise UserError(f"sink is {sink!r}; it must be {SINKS} with S from 1.")
    if window_tokens is not None and int(number) > window_tokens:
        problem = f"sink tokens={number} keeps more than the window of {window_tokens}"
        raise UserError(f"{problem}; keep at most as many tokens as the window has, or widen it.")
    return int(number)


def sink_from_json(value: object) -> str:
    """`static` from {"kind": "static"}, `tokens=4` from {"kind": "tokens", "tokens": 4}."""
    sink: object = value
    if isinstance(value, dict) and isinstance(kind := value.get("kind"), str):
        if value.keys() == {"kind"}:
            sink = kind
        elif value.keys() == {"kind", "tokens"} and type(value["tokens"]) is int:
            sink = f"{kind}={value['tokens']}"
    sink_tokens(sink)
    return str(sink)


def sink_as_json(sink: str) -> dict[str, object]:
    count = sink_tokens(sink)
    return {"kind": "tokens", "tokens": count} if count else {"kind": sink}
