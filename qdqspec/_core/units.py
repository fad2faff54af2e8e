"""Text of numbers and names, the same in verdicts, tables and reports."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from qdqspec.types import EXACT_DB, Interval, LatencyEvidence, Provenance, Site

_SHARE = re.compile(r"top\d+|miou")
_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")
_DURATIONS = (("d", 86_400), ("h", 3600), ("min", 60))
_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def ms_text(milliseconds: float) -> str:
    """Milliseconds with about three significant digits: ``0.066``, ``1.31``, ``26.5``, ``312``."""
    if not math.isfinite(milliseconds):
        return "unknown"
    return f"{milliseconds:.{_ms_decimals(milliseconds)}f}"


def ms_texts_apart(left: float, right: float) -> tuple[str, str]:
    """Both times, with enough digits to see which is larger."""
    first, second = ms_text(left), ms_text(right)
    if not 0 < abs(left - right) < math.inf or (float(first) - float(second)) * (left - right) > 0:
        return first, second
    decimals = _ms_decimals(max(abs(left), abs(right)))
    for more in range(6):
        first, second = (f"{value:.{decimals + more}f}" for value in (left, right))
        if first != second:
            break
    return first, second


def _ms_decimals(milliseconds: float) -> int:
    whole = abs(milliseconds)
    if 0 < whole < 0.0095:
        return 1 - math.floor(math.log10(whole))
    return 0 if whole >= 100 else 1 if whole >= 10 else 2 if whole >= 1 else 3


def ratio_text(ratio: float) -> str:
    """A factor with two decimals, three if it is below 0.1."""
    return f"{ratio:.3f}" if abs(ratio) < 0.1 else f"{ratio:.2f}"


def interval_text(interval: Interval) -> str:
    """The bounds of a 95 % interval of a factor: ``1.28 to 1.36``."""
    return f"{ratio_text(interval.low)} to {ratio_text(interval.high)}"


def at_least_text(bound: float) -> str:
    """The lower bound of a factor, rounded down: ``at least 1.05x``."""
    return f"at least {_bound_text(bound, ROUND_FLOOR)}x"


def at_most_text(bound: float) -> str:
    """The upper bound of a factor, rounded up: ``at most 0.98x``."""
    return f"at most {_bound_text(bound, ROUND_CEILING)}x"


def _bound_text(bound: float, rounding: str) -> str:
    """A factor with the digits of `ratio_text`; with more of them if a bound other than 1 would be rounded to 1."""
    if not math.isfinite(bound):
        return str(bound)
    for decimals in range(3 if abs(bound) < 0.1 else 2, 7):
        rounded = Decimal(bound).quantize(Decimal(1).scaleb(-decimals), rounding)
        if rounded != 1 or bound == 1:
            break
    return str(rounded)


def proved_text(latency: LatencyEvidence, min_gain: float) -> str:
    """The proved bound of the tuned model's speed-up, to follow its value.

    ``, at least 1.05x`` if a gain of ``min_gain`` is proved, ``, at most 1.01x`` if it is excluded, or
    ``, inconclusive``. Of a speed-up that was not tested, the interval: `` (95 %: 1.28 to 1.36)``.
    """
    tested = latency.tested.get("tuned")
    if tested is None:
        return f" (95 %: {interval_text(latency.speedup)})"
    if tested.proves(min_gain):
        return f", {at_least_text(tested.at_least)}"
    if tested.excludes(min_gain):
        return f", {at_most_text(tested.mean.inverse.high)}"
    return ", inconclusive"


def percent_text(fraction: float) -> str:
    """A signed percentage: ``+9.2 %``; insignificant digits are dropped."""
    value = 100 * fraction
    return f"{value:+.0f} %" if abs(value) >= 100 else f"{value:+.1f} %"


def share_text(fraction: float) -> str:
    """A fraction as a percentage without a sign: ``97.2 %``."""
    return f"{100 * fraction:.1f} %"


def is_share(metric: str) -> bool:
    """Whether a task metric is between 0 and 1, and is written in per cent."""
    return _SHARE.fullmatch(metric.partition(":")[0]) is not None


def texts_apart(
    text: Callable[[float, int], str], value: float, limit: float, slack: float = 0.0
) -> tuple[str, str]:
    """A value and its limit: with the limit's own digits, and enough to see which is larger, unless they differ by no
    more than ``slack``.
    """
    for more in range(digits_of(text, limit), 6):
        texts = text(value, more), text(limit, more)
        if texts[0] != texts[1] or abs(value - limit) <= slack:
            break
    return texts


def digits_of(text: Callable[[float, int], str], limit: float) -> int:
    """The fewest digits, more than usual and at most five, with which a limit of 19.996 is not written as 20.0."""
    written = [[*map(float, _NUMBER.findall(text(limit, more)))] for more in range(6)]
    return written.index(written[-1])


def metric_text(metric: str, value: float, more: int = 0) -> str:
    """The value of a task metric (``top1:logits``) with ``more`` digits than usual; a percentage if it is a share."""
    if is_share(metric):
        return f"{100 * value:.{1 + more}f} %"
    return f"{value:.{4 + more}g}"


def db_text(decibel: float) -> str:
    """Decibels; ``exact`` if the outputs are equal (200 dB and more)."""
    if math.isnan(decibel):
        return "not a number"
    return "exact" if decibel >= EXACT_DB else f"{decibel:.1f}"


def size_text(size_bytes: float) -> str:
    """Bytes with a binary unit: ``4.76 MiB``."""
    for unit, factor in _SIZES:
        if size_bytes >= factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds: float, *, rough: bool = False) -> str:
    """A duration: ``42 s``, ``3 min 05 s``, ``2 h 10 min``; a ``rough`` one in one unit: ``2 h``."""
    whole = round(seconds)
    if rough:
        unit, size = next((each for each in _DURATIONS if seconds >= 1.5 * each[1]), ("s", 1))
        return f"{seconds / size:.0f} {unit}"
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def origin_text(provenance: Provenance) -> str:
    """``measured``, or the source of an earlier result with its age: ``cached (2 h)``."""
    age = seconds_text(provenance.age_seconds, rough=True)
    return provenance.source if provenance.source == "measured" else f"{provenance.source} ({age})"


def signal_text(number: int) -> str:
    """The name of a signal: ``SIGKILL``; ``signal 99`` for an unknown one."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def count_text(number: int, noun: str, plural: str = "") -> str:
    """A number with its noun: ``1 pair``, ``12 pairs``; the ``plural`` is that with an s unless it is given."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"


def list_text(names: Sequence[str], most: int) -> str:
    """The first ``most`` names, and the number of other names: ``a, b and 3 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def names_text(names: Iterable[str]) -> str:
    """The number of names, and the first three: ``4: 'a', 'b', 'c' and 1 more``."""
    quoted = [f"'{name}'" for name in names]
    return f"{len(quoted)}: {list_text(quoted, 3)}"


def shapes_text(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Shapes as text: ``ids 1x8, mask 1x8``."""
    return ", ".join(f"{name} {'x'.join(map(str, shape)) or 'scalar'}" for name, shape in shapes.items())


def pair_text(site: Site) -> str:
    """A Q/DQ pair by its tensor and its readers: ``fire2/x > fire2/conv:0``."""
    ends = site.consumers
    readers = ["graph output" if end.is_output else f"{plain(end.node, 36)}:{end.input}" for end in ends]
    return f"{plain(site.tensor, 36)} > {list_text(readers, 2)}"


def plain(text: object, width: int | None = None) -> str:
    """One printable line of any text, such as a name in a model: the middle is cut out if it is too long."""
    line = "".join(
        c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in str(text)
    )
    if width is None or len(line) <= width:
        return line
    head = (width - 3) // 2
    return f"{line[:head]}...{line[len(line) - (width - 3 - head) :]}"


def cell_text(text: str) -> str:
    """One printable line for CSV. Text that a spreadsheet would evaluate as a formula gets an apostrophe in front."""
    line = plain(text)
    return f"'{line}" if line[:1] in ("=", "+", "-", "@") else line


def without_passwords(text: str) -> str:
    """The text with passwords in URLs masked: ``ssh://user:***@host``."""

    def masked(match: re.Match[str]) -> str:
        scheme, _, rest = match[0].partition("://")
        user, _, rest = rest.partition(":")
        _, at, host = rest.rpartition("@")  # the last one: a password may contain others
        return f"{scheme}://{user}:***@{host}" if at else match[0]

    return re.sub(r"\S+", masked, text)
