"""Puts errors and objects of foreign code into words, whatever that code made of them."""

from __future__ import annotations

from typing import Final

__all__ = ["describe_foreign", "locate_foreign", "show_foreign"]

# Who calls a plugin: where these are is no help to its author.
_OURS: Final = frozenset({"importlib", "kv_core", "pluggy"})


def describe_foreign(error: BaseException) -> str:
    """Return the class and the text of an error. Never raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text is made by code of the plugin
        return f"{type(error).__name__}: (an error without a readable text)"


def locate_foreign(error: BaseException) -> str:
    """Return where foreign code raised an error, as ``" at FILE:LINE"``, or an empty text."""
    place = ""
    step = error.__traceback__
    while step is not None:
        module = str(step.tb_frame.f_globals.get("__name__", ""))
        if module.split(".")[0] not in _OURS:
            place = f" at {step.tb_frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return place


def show_foreign(value: object) -> str:
    """Return the representation of an object, or its class. Never raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - as above
        return f"an object of type {type(value).__name__}"
