"""Puts errors and objects of foreign code into words, whatever that code made of them."""

from __future__ import annotations

__all__ = ["describe_foreign", "show_foreign"]


def describe_foreign(error: BaseException) -> str:
    """Return the class and the text of an error. Never raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text is made by code of the plugin
        return f"{type(error).__name__}: (an error without a readable text)"


def show_foreign(value: object) -> str:
    """Return the representation of an object, or its class. Never raises."""
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - as above
        return f"an object of type {type(value).__name__}"
