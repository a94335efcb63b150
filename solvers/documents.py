"""Problem files as JSON documents, plain or gzipped: every fault of the text is one line that names its place."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from os import PathLike
from pathlib import Path
from typing import Any

from .errors import ProblemError


def read_document(path: str | PathLike[str]) -> Any:
    """The value in a file of JSON. Raises ProblemError for what is no JSON, OSError when the file cannot be read."""
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ProblemError(f"broken gzip data ({error})", "fetch the file again") from error
    try:
        return json.loads(data, object_pairs_hook=_each_once)
    except UnicodeDecodeError as error:
        raise ProblemError(f"not text in UTF-8 (byte {error.start})", "give a problem file in JSON, plain or gzipped") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise ProblemError(f"not valid JSON: {error.msg} at {place}", "the file may be cut short; write it again") from error
    except RecursionError as error:
        raise ProblemError("not a problem: nested too deep", "see the keys in the package's documentation") from error
    except ProblemError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ProblemError(f"not a problem: {str(error).partition(';')[0]}", "costs and usages are 64-bit integers") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. Raises ProblemError: of a key that stands twice one value alone could count."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ProblemError(f"the key {key[:60]!r} stands twice in one object", "keep the one that is meant")
    return found
