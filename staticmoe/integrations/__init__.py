"""Doors to other training stacks. Each is imported by its own name, and its package only when it is used."""
