"""How pages write numbers, amounts and times: rounded, unlike `csv_file.py`. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from urllib.parse import urlsplit, urlunsplit

from markupsafe import Markup

from tenants.audit.field_changes import changes

MICROSECONDS = 1_000_000
NANO = 1_000_000_000
NONE = "–"


def at(instant_us: int) -> str:
    """UTC, to the minute."""
    return _moment(instant_us).strftime("%Y-%m-%d %H:%M UTC")


def day(start_s: int) -> str:
    return _moment(start_s * MICROSECONDS).strftime("%Y-%m-%d")


def time(instant: int | str | None) -> Markup:
    """An element that a script rewrites into the viewer's time zone; its title stays UTC. `instant`: in
    microseconds, or ISO 8601."""
    if instant is None:
        return Markup(NONE)
    moment = datetime.fromisoformat(instant) if isinstance(instant, str) else _moment(instant)
    text = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    element = Markup('<time datetime="{}" title="{}">{}</time>')
    return element.format(moment.isoformat(timespec="milliseconds"), text, text)


def number(value: float | None) -> str:
    """A count with thousands separators; fractions with one or two digits."""
    if value is None:
        return NONE
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    return f"{value:z,.1f}" if abs(value) >= 10 else f"{value:z,.2f}"


def short(value: float | None) -> str:
    """A count in three digits: 1.24 M."""
    if value is None:
        return NONE
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.3g}"


def exact_dollars(nanousd: int) -> str:
    """All digits, at least two behind the point."""
    whole = f"{Decimal(nanousd) / NANO:f}"
    before, _, after = whole.partition(".")
    return f"{before}.{after.rstrip('0').ljust(2, '0')}"


def money(nanousd: int | None) -> str:
    """To the cent; below a dollar to four digits."""
    if nanousd is None:
        return NONE
    sign, dollars = "-" if nanousd < 0 else "", abs(Decimal(nanousd)) / NANO
    if dollars and dollars < 1:
        return f"{sign}${dollars:.4f}" if dollars >= Decimal("0.0001") else f"{sign}<$0.0001"
    return f"{sign}${dollars:,.2f}"


def exact_money(nanousd: int | None) -> Markup:
    """`money` with all digits in its title, and in nano-dollars for programs."""
    if nanousd is None:
        return Markup(NONE)
    element = Markup('<data value="{}" title="${}">{}</data>')
    return element.format(nanousd, exact_dollars(nanousd), money(nanousd))


def fine_money(nanousd: int) -> str:
    """Three digits that count, however small: $0.0000412."""
    dollars = Decimal(nanousd) / NANO
    if not dollars or abs(dollars) >= 1:
        return money(nanousd)
    return f"${round(dollars, 2 - dollars.adjusted()):f}"


def about(value: float | None) -> str:
    """Seconds of an estimate: tenths below 10, then whole ones."""
    if value is None or value >= 119.5:
        return seconds(value)
    return f"{value:.0f} s" if value >= 9.95 else f"{value:.1f} s"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    if 0 < abs(value) < 0.01:
        return f"{value * 1000:.2g} ms"
    if abs(value) < 1:
        return f"{value * 1000:.0f} ms"
    if abs(value) < 120:
        return f"{value:.1f} s"
    if abs(value) < 7_200:
        return f"{value / 60:.0f} min"
    return f"{value / 3_600:.1f} h" if abs(value) < 172_800 else f"{value / 86_400:.1f} days"


def percent(part: float | None) -> str:
    return NONE if part is None else f"{100 * part:z.1f} %"


def without_password(url: str) -> str:
    """A URL without user name and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.netloc else url


_BROWSERS = {"Edg/": "Edge", "OPR/": "Opera", "Firefox/": "Firefox", "Chrome/": "Chrome", "Safari/": "Safari"}
_SYSTEMS = {
    "Android": "Android",
    "iPhone": "iOS",
    "iPad": "iOS",
    "Windows": "Windows",
    "Mac OS": "macOS",
    "Linux": "Linux",
}


def browser(user_agent: str) -> str:
    """A browser's short name, or its own words if it is unknown."""
    name = next((name for mark, name in _BROWSERS.items() if mark in user_agent), "")
    system = next((name for mark, name in _SYSTEMS.items() if mark in user_agent), "")
    return " on ".join(word for word in (name, system) if word) or user_agent[:60] or "unknown"


def _moment(instant_us: int) -> datetime:
    return datetime.fromtimestamp(instant_us / MICROSECONDS, UTC)


FILTERS = {
    "at": at,
    "time": time,
    "day": day,
    "number": number,
    "short": short,
    "money": money,
    "exact_money": exact_money,
    "fine_money": fine_money,
    "seconds": seconds,
    "about": about,
    "percent": percent,
    "browser": browser,
    "changes": changes,
}
