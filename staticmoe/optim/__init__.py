"""Optimizers and their adapters to a captured iteration."""
