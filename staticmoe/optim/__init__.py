"""Optimizers and their adapters to a captured iteration."""

from __future__ import annotations

from staticmoe.optim.adamw import AdamW

__all__ = ["AdamW"]
