"""Tables of records for the terminal."""

import itertools
import math
import statistics

from rich import box
from rich.table import Table

from ghostnoise.bench.settings import Record

STYLES = {"torch": "bold", "peer": "", "limit": "dim", "ours": "cyan", "flex": "blue"}
STEP, PART, REST = "step", "part", "rest"
UNITS = {"layer": 1e3, "network": 1.0}  # of a profile, per millisecond: records of networks were measured earlier


def name(record: Record) -> str:
    """Return the contender, with its backend if it has one, as in earlier records."""
    return f"{record['contender']} ({record['backend']})" if record.get("backend") else str(record["contender"])


def row_table(records: list[Record]) -> Table:
    """Return a table of the contenders of one row."""
    makers = {"memory": _memory_table, "profile": _profile_table}
    return makers.get(records[0]["bench"], _time_table)(records)


def summary_table(records: list[Record]) -> Table | None:
    """Return a table of ratios of medians to the layer of `torch.nn`; None if there is one row only. See `summary`."""
    if records[0]["bench"] != "layers" or len({record["row"] for record in records}) < 2:
        return None
    columns, rows = summary(records)
    table = _table(columns, f"p50 ratios to nn.BatchNorm*d or nn.LayerNorm, {records[0]['allocator']} allocator")
    kinds = {name(record): record["kind"] for record in records}
    for contender, cells in rows.items():
        table.add_row(contender, *map(number, cells), style=STYLES[kinds[contender]])
    return table


def summary(records: list[Record]) -> tuple[list[str], dict[str, list[float]]]:
    """Return headings, and for each contender the ratios of its medians to those of the layer of `torch.nn`.

    They are the geometric means and the maximum over the image rows, except for the small one that measures the fixed
    cost, and the other rows.
    """
    images = [each for each in records if str(each["shape"]).count("x") == 3 and not each.get("fixed_cost")]
    formats = list(dict.fromkeys(record["memory_format"] for record in images))
    others = list(dict.fromkeys(record["row"] for record in records if record not in images))
    columns = [
        *("mean,\n" + form.replace("_", "\n") for form in formats),
        *(["worst\nimage"] if images else []),
        *others,
    ]
    rows: dict[str, list[float]] = {}
    for contender in dict.fromkeys(name(record) for record in records if record["kind"] != "torch"):
        ratios = {record["row"]: record["ratio_p50"] for record in records if name(record) == contender}
        of_images = {
            form: [
                ratios[record["row"]]
                for record in images
                if name(record) == contender and record["memory_format"] == form
            ]
            for form in formats
        }
        cells = [geometric_mean(of_images[form]) for form in formats]
        cells += [max(itertools.chain(*of_images.values()), default=math.nan)] if images else []
        rows[contender] = cells + [ratios.get(row, math.nan) for row in others]
    return columns, rows


def memory_summary(records: list[Record]) -> tuple[list[str], dict[str, list[float]]]:
    """Return headings, and for each contender the saved tables and the ratio of the peak in each row."""
    rows, contenders = (list(dict.fromkeys(map(key, records))) for key in (lambda each: each["row"], name))
    found = {(name(each), each["row"]): each for each in records}
    values = {"tables saved": "tables_saved", "peak ratio": "ratio_peak"}
    columns = [f"{row}: {heading}" for row in rows for heading in values]
    cells = [(row, key) for row in rows for key in values.values()]
    return columns, {
        each: [found[each, row][key] if (each, row) in found else math.nan for row, key in cells] for each in contenders
    }


def geometric_mean(ratios: list[float]) -> float:
    """Return the geometric mean of ratios; NaN if there are none."""
    return statistics.geometric_mean(ratios) if ratios else math.nan


TIMES = {
    "p20_ms": "p20\nms", "p50_ms": "p50\nms", "counterpart_ms": "PyTorch\nms", "p80_ms": "p80\nms",
    "ratio_p50": "p50\nratio", "ratio_best": "best\nratio", "over_limit": "over\nlimit", "over_eager": "over\neager",
    "added_ratio": "added\nratio", "images_per_second": "images\n/s", "speed_ratio": "speed\nratio", "n": "n",
}  # fmt: skip


def _time_table(records: list[Record]) -> Table:
    keys = [key for key in TIMES if any(key in record for record in records)]
    baseline = "what PyTorch has" if records[0]["bench"] == "flex" else records[0]["contender"]
    table = _table([TIMES[key] for key in keys], f"{records[0]['row']}: ratios to {baseline}")
    for record in records:
        cells = [str(record[key]) if key == "n" else number(record.get(key, math.nan)) for key in keys]
        table.add_row(name(record), *cells, style=STYLES[record["kind"]])
    return table


def _memory_table(records: list[Record]) -> Table:
    first = records[0]
    title = f"{first['row']}: x is {_mega(first['x_bytes'])} MB, a table 4·B·C bytes"
    columns = ["saves\nx", "tables\nsaved", "tables\nheld", "kept\nMB", "ratio", "peak\nMB", "ratio"]
    table = _table(columns, title)
    for record in records:
        saves = "yes" if record["saved_x_bytes"] else "no"
        tables = [number(record[key]) for key in ("tables_saved", "tables_held")]
        kept = _mega(record["saved_x_bytes"] + record["held_bytes"])
        cells = [kept, number(record["ratio_kept"]), _mega(record["peak_bytes"]), number(record["ratio_peak"])]
        table.add_row(name(record), saves, *tables, *cells, style=STYLES[record["kind"]])
    return table


def _profile_table(records: list[Record]) -> Table:
    """Return a table with a line for each part, and a column for each contender that has parts."""
    columns = list(dict.fromkeys(each["contender"] for each in records if each["level"] == PART))
    cells = {(each["contender"], each["part"]): part_text(each) for each in records}
    first = records[0]
    baseline = f"{first['contender']}, {number(1e3 * first['p50_ms'])} µs"
    table = _table(columns, f"{first['row']}: µs of a step and its parts (ratio to {baseline})")
    for part in parts(records):
        style = "bold" if part == STEP else ""
        table.add_row(part, *(cells.get((contender, part), "") for contender in columns), style=style)
    return table


def parts(records: list[Record]) -> list[str]:
    """Return the names of all parts, the rest last."""
    return sorted(dict.fromkeys(each["part"] for each in records), key=lambda part: part == REST)


def _table(columns: list[str], title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def number(value: float) -> str:
    """Format a number with two decimals, or none from 100 on; empty for NaN."""
    return "" if math.isnan(value) else f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def part_text(record: Record) -> str:
    """Return the time of a part in the unit of its scope and, in parentheses, its ratio."""
    taken = UNITS[record["scope"]] * float(record["p50_ms"])
    return f"{taken:.{0 if abs(taken) >= 100 else 1}f} ({number(float(record['ratio_p50']))})"


def _mega(size: int) -> str:
    return number(size / 1e6)
