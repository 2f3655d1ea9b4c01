"""Sections of the config that plug-ins declare."""

from __future__ import annotations

_sections: dict[str, type] = {}


def register_section(key: str, section: type) -> None:
    """Make the fields of the dataclass `section` keys below `key`, a dotted name."""
    _sections[key] = section


def plugin_sections() -> dict[str, type]:
    """The dataclass of each section that a plug-in declares, by the section's dotted name."""
    return dict(_sections)
