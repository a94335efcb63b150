"""A small linear program, from a dense table straight into HiGHS."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from .arrays import Floats, offsets


class Range(NamedTuple):
    """The least and the largest value of each row, or of each variable."""

    least: Floats
    most: Floats


def minimise(costs: Floats, variables: Range, table: Floats, rows: Range) -> tuple[Floats, Floats]:
    """The values of the variables that cost least, and the duals of the rows.

    Args:
        costs: of each variable.
        table: coefficients; shape [rows, variables].
    """
    import highspy

    row, column = np.nonzero(table)
    lp = highspy.HighsLp()
    lp.num_row_, lp.num_col_ = table.shape
    lp.col_cost_, (lp.col_lower_, lp.col_upper_), (lp.row_lower_, lp.row_upper_) = costs, variables, rows
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = offsets(np.bincount(row, minlength=len(table)))
    lp.a_matrix_.index_, lp.a_matrix_.value_ = column, table[row, column]
    model = cast(Any, highspy.Highs)()
    model.setOptionValue("output_flag", False)
    model.passModel(lp)
    model.run()
    solution = model.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)
