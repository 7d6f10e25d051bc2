"""Numbers and names as the report's page shows them: separators, units, durations."""

from __future__ import annotations

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))

ACRONYMS = {
    "mae": "MAE",
    "mse": "MSE",
    "rmse": "RMSE",
    "map": "mAP",
    "sample_f1": "sample F1",
    "auroc": "AUROC",
    "r2": "R²",
}


def metric_name(metric: str) -> str:
    """Write a metric's name.

    >>> metric_name("balanced_accuracy"), metric_name("macro_f1"), metric_name("mae")
    ('balanced accuracy', 'macro F1', 'MAE')
    """
    return ACRONYMS.get(metric, metric.replace("_", " ").replace(" f1", " F1"))


def thousands(number: float) -> str:
    """Write a count with thousands separators.

    >>> thousands(12345)
    '12,345'
    """
    return f"{number:,.0f}"


def readable(number: float) -> str:
    """Write a large count with three digits and a prefix.

    >>> readable(950), readable(128396), readable(4.0e6), readable(999_999)
    ('950', '128 k', '4 M', '1 M')
    """
    for size, prefix in PREFIXES:
        if number >= 0.9995 * size:
            return f"{float(f'{number / size:.3g}'):g} {prefix}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """Write a time in its two largest units.

    >>> duration(2.44), duration(48.2), duration(192), duration(3840)
    ('2.4 s', '48 s', '3 min 12 s', '1 h 04 min')
    """
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    rest = round(seconds)
    if rest < 60:
        return f"{rest} s"
    if rest < 3600:
        return f"{rest // 60} min {rest % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def decimal(number: float) -> str:
    """Write a score or an error: three decimals, fewer for large numbers.

    >>> decimal(0.87512), decimal(47.318), decimal(12345.6)
    ('0.875', '47.32', '12,346')
    """
    size = abs(number)
    return f"{number:,.{3 if size < 10 else 2 if size < 100 else 1 if size < 1000 else 0}f}"
