"""Rows of Parquet files and of the Arrow files that `datasets` saves, a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.trainer.data.records import TruncatedError
from tasks.trainer.errors import InputError

_BATCH_ROWS = 256


def read_rows(url: str, kind: str) -> Iterator[dict[str, Any]]:
    """The rows as plain Python values. kind: `parquet` or `arrow`.

    Raises:
        InputError: it is no such file. A cut Parquet file is none: its directory is its end.
        TruncatedError: an Arrow file ends in the middle; the rows of its whole batches were given.
    """
    with fsspec.open(url, "rb", compression="infer") as file:
        number = 0
        try:
            for batch in _parquet(file) if kind == "parquet" else _arrow(file):
                for row in batch.to_pylist():
                    number += 1
                    yield row
        except (pa.ArrowInvalid, OSError) as error:
            if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
                raise
            if kind == "parquet" or not number:
                raise InputError(f"{url} is no {kind} file, or is cut: nothing of it can be read") from None
            raise TruncatedError(f"row {number + 1}") from None


def _parquet(file: Any) -> Iterator[pa.RecordBatch]:
    yield from pq.ParquetFile(file).iter_batches(batch_size=_BATCH_ROWS)


def _arrow(file: Any) -> Iterator[pa.RecordBatch]:
    """`datasets` writes streams; other programs files, which begin with their name."""
    if file.read(6) == b"ARROW1":
        reader = pa.ipc.open_file(file)
        yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
        return
    file.seek(0)
    yield from pa.ipc.open_stream(file)
