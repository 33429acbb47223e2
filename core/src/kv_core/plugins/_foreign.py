"""Puts errors of foreign code into words, whatever that code made of them."""

from __future__ import annotations

__all__ = ["describe_foreign"]


def describe_foreign(error: BaseException) -> str:
    """Return the class and the text of an error. Never raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - the text is made by code of the plugin
        return f"{type(error).__name__}: (an error without a readable text)"
