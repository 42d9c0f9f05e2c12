"""The rules of reuse, by name: `full`, `window`, `state`, and those that `register_family` adds."""

from .base import Family, family_class, register_family
from .builtin import Full, State, Window

register_family("full", Full)
register_family("window", Window)
register_family("state", State)

__all__ = ["Family", "Full", "State", "Window", "family_class", "register_family"]
