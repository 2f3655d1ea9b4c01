"""The table of TRL's names in `docs/from-trl.md`: `python -m docs.generators.trl_table` writes it."""

from __future__ import annotations

from pathlib import Path

from verl.config.keys import trl_names

PAGE = Path(__file__).resolve().parents[1] / "from-trl.md"
BEGIN, END = "<!-- table of verl/config/trl_names.json -->", "<!-- end of the table -->"


def table() -> str:
    """The table as Markdown."""
    names = trl_names()
    lines = ["| TRL | here |", "|---|---|"]
    for name in sorted(names["keys"] | names["notes"]):
        keys = ", ".join(f"`{key}`" for key in names["keys"].get(name, ()))
        lines.append(f"| `{name}` | {keys or names['notes'][name]} |")
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its table replaced by the current one."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
