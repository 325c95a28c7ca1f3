"""Arithmetic of half-open intervals (start, end) in ns: union, clipping, length, overlap."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[int, int]


def union(spans: Iterable[Span]) -> list[Span]:
    """The same points in disjoint intervals, by start; empty ones fall away."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(spans: Iterable[Span], window: Span) -> list[Span]:
    """What of them lies in the window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in spans)
    return [(start, end) for start, end in cut if end > start]


def length(spans: Iterable[Span]) -> int:
    """Sum of the lengths, in ns; of disjoint intervals the length of their union."""
    return sum(end - start for start, end in spans)


def overlap(first: list[Span], second: list[Span]) -> int:
    """Length in ns of the points that lie in both; each is a result of `union`."""
    total, here, there = 0, 0, 0
    while here < len(first) and there < len(second):
        start = max(first[here][0], second[there][0])
        end = min(first[here][1], second[there][1])
        total += max(0, end - start)
        if first[here][1] <= second[there][1]:
            here += 1
        else:
            there += 1
    return total
