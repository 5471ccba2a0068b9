"""Ways to compute attention, one file each."""

NEEDS = ("unavailable", "supports", "priority", "attend")
"""What an attention backend must answer. A backend is a file of this folder with four functions:

    unavailable() -> str | None       why it cannot run on this machine at all (None: it can)
    supports(call) -> str | None      why it cannot compute this call (None: it can)
    priority(call) -> int | None      the highest is asked first; None: only when it is named
    attend(call) -> Tensor            the attention output, (B, H, T, D)

A backend must not ignore any part of a call: `supports` names what it cannot do, without numbers
that change from call to call: each distinct reason is shown once. A backend with a priority that
refuses a call is reported to the user: return None for calls that it is not meant for. Where
`make gpu` has measured windows on a device (rates.json), the rates come before the priorities.
"""
