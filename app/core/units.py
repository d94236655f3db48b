"""Formats times and sizes, the same way in pages, CLI and messages, and reads those of people."""

from __future__ import annotations

import re

_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) *(?:([kmgtp])(i?)b?|b)", re.IGNORECASE)
_TIMES = re.compile(r"(?:\d{1,15}(?:\.\d{1,9})? *(?:ms|[smhdw]) *)+", re.IGNORECASE)
_TIME = re.compile(r"(\d{1,15}(?:\.\d{1,9})?) *(ms|[smhdw])", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def parse_bytes(text: str) -> int:
    """Read a size such as "16GB" (of 1000s) or "1.5 GiB" (of 1024s); raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError('a size such as "16GB" or "1.5GiB"')
    power = " kmgtp".index((found[2] or " ").lower())
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def parse_seconds(text: str) -> float:
    """Read a duration such as "4h", "90m" or "1h 30m"; raises ValueError."""
    if not _TIMES.fullmatch(text.strip()):
        raise ValueError('a duration such as "4h", "1h30m" or "45s"')
    parts = _TIME.findall(text)
    return float(sum(float(number) * _SECONDS[unit.lower()] for number, unit in parts))


def duration(seconds: float) -> str:
    """Format a duration in two units at most: "340 ms", "12.3 s", "4m 05s", "3h 20m", "2d 04h"."""
    seconds = max(0.0, seconds)
    if 0 < seconds < 0.95:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds else "0 s"
    seconds = max(60.0, seconds)
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if seconds < 3600:
        return f"{minutes}m {int(seconds % 60):02}s"
    if seconds < 86400:
        return f"{hours}h {minutes % 60:02}m"
    return f"{hours // 24}d {hours % 24:02}h"


def age(seconds: float) -> str:
    """Format how long ago something was, in one unit: "now", "12s", "7m", "3h", "2d"."""
    whole = int(max(0.0, seconds))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}"
    return "now"


def size(count: int) -> str:
    """Format bytes in binary units: "512 B", "7.9 KiB", "4.0 GiB"."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def counted(count: int, thing: str) -> str:
    """Format a number with its noun: "1 task", "2 tasks"."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
