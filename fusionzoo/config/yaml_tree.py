"""Check a YAML document before values are built from it: duplicate keys and aliases."""

from __future__ import annotations

import re
from typing import Any

from fusionzoo.errors import FusionZooError

MAX_VALUES = 100_000  # in a document, with its aliases replaced by what they refer to


def check_tree(root: Any, source: str) -> None:
    """Raise an error for a duplicate key, an alias to itself, or aliases that multiply.

    YAML's own loader keeps the last value of a duplicate key. Ten lines of aliases of aliases may
    stand for more values than memory holds ("billion laughs").
    """
    _count_values(root, source, {}, set())


def _count_values(node: Any, source: str, counts: dict[int, int], above: set[int]) -> int:
    """Return the number of values below a node; `above` are the nodes that contain it."""
    import yaml

    if not isinstance(node, yaml.CollectionNode):
        _refuse_other_bases(node, source)
        return 1
    if id(node) in counts:  # an alias
        return counts[id(node)]
    if id(node) in above:
        raise FusionZooError(f"{source}, line {_line(node)}: an alias refers to its own value")
    if isinstance(node, yaml.MappingNode):
        _refuse_duplicates(node, source)
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value
    above.add(id(node))
    count = 1 + sum(_count_values(child, source, counts, above) for child in children)
    above.remove(id(node))
    if count > MAX_VALUES:
        raise FusionZooError(
            f"{source}, line {_line(node)}: with its aliases replaced, it has {count:,} values; at"
            f" most {MAX_VALUES:,} are read"
        )
    counts[id(node)] = count
    return count


def _refuse_other_bases(scalar: Any, source: str) -> None:
    """Refuse `1:30` and `010`, which YAML 1.1 reads as 90 and 8."""
    word = scalar.value
    if scalar.tag.endswith((":int", ":float")) and re.match(r"[-+]?0[0-7_]+$|.*:", word):
        raise FusionZooError(
            f"{source}, line {_line(scalar)}: YAML reads {word} as a number to base"
            f" {60 if ':' in word else 8}: write it as a plain number, or as text in quotes"
        )


def _refuse_duplicates(mapping: Any, source: str) -> None:
    import yaml

    first: dict[str, int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.value in first:
            raise FusionZooError(
                f"{source}, line {_line(key)}: duplicate key {key.value!r}; the first is in line"
                f" {first[key.value]}"
            )
        first[key.value] = _line(key)


def _line(node: Any) -> int:
    line: int = node.start_mark.line
    return line + 1
