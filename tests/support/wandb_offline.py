"""What an offline run of W&B holds, read from its file; and a stand-in for a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def offline_records(path: Path) -> list[bytes]:
    """Of an offline run: after 7 bytes of W&B's, the log format of LevelDB, whose blocks of 32 KiB hold pieces with a checksum
    (4 bytes), a length (2) and a type (1 whole, 2 first, 3 middle, 4 last)."""
    stored = path.read_bytes()
    records = [b""]
    place = 7
    assert stored.startswith(b":W&B")
    while place + 7 <= len(stored):
        if (room := 32768 - place % 32768) < 7:
            place += room
            continue
        size = int.from_bytes(stored[place + 4 : place + 6], "little")
        kind = stored[place + 6]
        records[-1] += stored[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            records.append(b"")
    return records[:-1]


def parsed(path: Path) -> list[Any]:
    from wandb.proto import wandb_internal_pb2

    records = []
    for stored in offline_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(stored)
        records.append(record)
    return records


def offline_history(path: Path) -> list[dict[str, str]]:
    """The metrics of every call of `log`, as JSON text by name."""
    items = [record.history.item for record in parsed(path) if record.WhichOneof("record_type") == "history"]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in logged} for logged in items]


def offline_summary(path: Path) -> dict[str, Any]:
    """The run's summary at its end."""
    summary: dict[str, Any] = {}
    for record in parsed(path):
        if record.WhichOneof("record_type") == "summary":
            for item in record.summary.update:
                summary["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return summary


class FakeRun:
    id = "fake"
    dir = "somewhere/files"

    def __init__(self) -> None:
        self.summary: dict[str, Any] = {}

    def log(self, *args: Any, **more: Any) -> None:
        pass

    def log_artifact(self, artifact: Any) -> None:
        pass

    def finish(self) -> None:
        pass
