"""The second half of ``eyas check A B``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from eyas.cli import common

if TYPE_CHECKING:
    from eyas.records import Record
    from eyas.target import Target


def compare(
    folders: tuple[Path, Path],
    target: Target,
    records: Sequence[Record],
    *,
    names: tuple[str, str],
    json: Path | None,
    **options: Any,
) -> NoReturn:
    """Check two drafters, print and write how they compare, and exit."""
    from eyas.check import pair
    from eyas.report.pair import print_pair

    with common.checking(f"walking {len(records)} records, twice", len(records)) as (progress, tried):
        result = pair.check_pair(folders, target, records, names=names, progress=progress, tried=tried, **options)
    told = result.to_json()
    common.write_result(told, json)
    print_pair(told, common.console_for(json))
    sys.exit(result.exit_code)
