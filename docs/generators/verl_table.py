"""The tables of verl's names in `docs/from-verl.md`: `python -m docs.generators.verl_table` writes them."""

from __future__ import annotations

from pathlib import Path

from verl.config.aliases import verl_names

PAGE = Path(__file__).resolve().parents[1] / "from-verl.md"
BEGIN, END = "<!-- tables of verl/config/verl_names.json -->", "<!-- end of the tables -->"


def tables() -> str:
    """One table of each answer, as Markdown."""
    rows = verl_names().values()
    lines = ["### Read as", "", "| key | here |", "|---|---|"]
    for row in rows:
        if row.alias:
            values = "; ".join(f"`{theirs}` is `{ours}`" for theirs, ours in row.values.items())
            more = f": {values}" if values else ", divided by the GPUs" if row.per_gpu else ""
            lines.append(f"| `{row.name}` | `{row.alias}`{more} |")
    for title, reasons in (
        ("Accepted without effect", [(row.unneeded, row) for row in rows if row.unneeded]),
        ("Refused", [(row.refused, row) for row in rows if row.refused]),
    ):
        lines += ["", f"### {title}", "", "| key | why |", "|---|---|"]
        names: dict[str, list[str]] = {}
        for reason, row in reasons:
            names.setdefault(reason, []).append(f"`{row.name}`")
        lines += [f"| {', '.join(keys)} | {reason} |" for reason, keys in names.items()]
    return "\n".join(lines)


def with_table(page: str) -> str:
    """The page with its tables replaced by the current ones."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
