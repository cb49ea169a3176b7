"""Records on disk: JSON, and the same as CSV."""

import csv
import json
from pathlib import Path

from ghostnoise.bench.settings import Record


def write(folder: Path, bench: str, records: list[Record], left_out: list[str]) -> list[Path]:
    """Write `<bench>.json`, which also says what was left out, and `<bench>.csv`."""
    folder.mkdir(parents=True, exist_ok=True)
    as_json, as_csv = folder / f"{bench}.json", folder / f"{bench}.csv"
    as_json.write_text(json.dumps({"bench": bench, "left_out": left_out, "records": records}, indent=1) + "\n")
    with as_csv.open("w", newline="") as file:
        columns = dict.fromkeys(key for record in records for key in record)
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(records)
    return [as_json, as_csv]


def read(path: Path) -> list[Record]:
    """The records of a JSON file."""
    records: list[Record] = json.loads(path.read_text())["records"]
    return records
