"""How a set of tensors is cut into blocks that are coded independently, in parallel.

16-bit floats are cut into segments (whole tensors, or row ranges of very large ones), and segments
are gathered into blocks of up to 2**24 elements: enough to learn from, small enough to share among
cores. Both ends derive the same cut from the specs. Other dtypes are coded tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from ....storage.bits import TensorSpec

BLOCK_ELEMENTS: Final = 1 << 24
MIN_COLUMNS: Final = 32
MIN_ROWS: Final = 8
COLUMN_UNIT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """Where the exponent is in a 16-bit float."""

    shift: int
    """Bits below the exponent."""
    mask: int
    """Ones over the exponent's width."""


FLOAT_FORMATS: Final = {
    "bfloat16": FloatFormat(shift=7, mask=255),
    "float16": FloatFormat(shift=10, mask=31),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A tensor seen as rows and columns, for statistics."""

    rows: int
    columns: int

    @property
    def has_rows(self) -> bool:
        """Whether rates per row, and directions per column, are kept."""
        return self.rows >= MIN_ROWS


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRange:
    """Elements [first, last) of a tensor; whole rows of its grid."""

    spec: TensorSpec
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Segments of one dtype that share a stream and its contexts."""

    dtype: str
    segments: tuple[SegmentRange, ...]

    @property
    def num_elements(self) -> int:
        return sum(segment.last - segment.first for segment in self.segments)

    @property
    def label(self) -> str:
        """The tensors' names, shortened, for messages."""
        first, last = self.segments[0].spec.name, self.segments[-1].spec.name
        return repr(first) if first == last else f"{first!r} to {last!r}"


def grid_of(spec: TensorSpec) -> Grid:
    """The last dimension as columns where it is wide, else all but the first, else one row.

    Columns are a multiple of eight, so that runs of eight elements lie in one row.
    """
    number = spec.num_elements
    shape = spec.shape
    for columns in (shape[-1] if shape else 1, number // max(shape[0], 1) if shape else 1):
        is_wide = columns >= MIN_COLUMNS and columns % COLUMN_UNIT == 0
        if is_wide and number >= MIN_ROWS * columns:
            return Grid(rows=number // columns, columns=columns)
    return Grid(rows=1, columns=max(number, 1))


def cut_blocks(specs: Sequence[TensorSpec]) -> list[Block]:
    """All blocks of the 16-bit floats among `specs`, in order, by dtype."""
    blocks = []
    for dtype in FLOAT_FORMATS:
        gathered: list[SegmentRange] = []
        for segment in _segments([spec for spec in specs if spec.dtype == dtype]):
            filled = sum(item.last - item.first for item in gathered)
            if gathered and filled + segment.last - segment.first > BLOCK_ELEMENTS:
                blocks.append(Block(dtype=dtype, segments=tuple(gathered)))
                gathered = []
            gathered.append(segment)
        if gathered:
            blocks.append(Block(dtype=dtype, segments=tuple(gathered)))
    return blocks


def plain_specs(specs: Sequence[TensorSpec]) -> list[TensorSpec]:
    """The tensors that are coded without a model of 16-bit floats."""
    return [spec for spec in specs if spec.dtype not in FLOAT_FORMATS and spec.num_elements]


def _segments(specs: Sequence[TensorSpec]) -> Iterator[SegmentRange]:
    for spec in specs:
        grid = grid_of(spec)
        step = BLOCK_ELEMENTS
        if grid.rows > 1:
            step = max(BLOCK_ELEMENTS // grid.columns, 1) * grid.columns
        for first in range(0, spec.num_elements, step):
            last = min(first + step, spec.num_elements)
            yield SegmentRange(spec=spec, first=first, last=last)
