"""One file a way of computing attention; see `_interface.py` for what each must answer."""

NEEDS = ("unavailable", "supports", "attend")
