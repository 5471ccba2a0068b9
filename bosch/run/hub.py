"""Whether the Hugging Face hub can be reached, by one short try: its libraries try each file for 23
seconds."""

import functools
import os
import socket
import sys
from urllib.parse import urlsplit

from bosch.run.memory import set_variable

SECONDS = 3.0
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")


def prepare_hub() -> None:
    """Call this before a library may ask the hub. If it cannot be reached, the libraries of this
    process and its children use what is in their caches, and say at once what is not."""
    if is_reachable():
        return
    set_variable("HF_HUB_OFFLINE", "1")
    # A library that is imported already has read the variable.
    for name in ("huggingface_hub.constants", "datasets.config"):
        if module := sys.modules.get(name):
            vars(module)["HF_HUB_OFFLINE"] = True


def is_offline() -> bool:
    """Whether the libraries will not ask the hub: somebody said so, or it cannot be reached."""
    said = os.environ.get("HF_HUB_OFFLINE", "").upper()
    return said in ("1", "ON", "YES", "TRUE") or not is_reachable()


@functools.cache
def is_reachable() -> bool:
    if any(os.environ.get(name) for name in ("HF_HUB_OFFLINE", *PROXIES)):
        return True  # somebody has decided this, or a proxy knows the way
    address = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), SECONDS).close()
    except OSError:
        return False
    return True
