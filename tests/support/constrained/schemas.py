"""Schemas to ask for: random ones by hypothesis, and those of the JSON Schema test suite.

hypothesis-jsonschema 0.23 draws the values in them, and no objects: its way to draw those is gone from
hypothesis.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis_jsonschema import from_schema

Schema = Mapping[str, Any]

NAMES = ("a", "name", "x y", "größe", 'q"')
VALUES = from_schema({"type": ["string", "integer", "boolean", "null"], "maxLength": 6})
PATTERNS = ("^[a-c]+$", r"^\d{2}-\d$", "x", "^(yes|no)$", "^a(?=b)", r"^\w+ \w+$")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email", "iri")
DIALECTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


def drawn(count: int, seed: int, depth: int = 2) -> list[Schema]:
    """So many different ones, always the same. Some of them no text fits, and some have what is refused."""
    found: dict[str, Schema] = {}

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=3 * count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(_schemas(depth))
    def collect(schema: Schema) -> None:
        found[json.dumps(schema, sort_keys=True)] = schema

    collect()
    return list(found.values())[:count]


def of_suite(folder: Path) -> Iterator[Schema]:
    """All of a checkout of the suite that are objects, by dialect."""
    for dialect, uri in DIALECTS.items():
        for file in sorted((folder / "tests" / dialect).rglob("*.json")):
            for case in json.loads(file.read_text(encoding="utf-8")):
                if isinstance(case["schema"], dict):
                    yield {"$schema": uri, **case["schema"]}


def _schemas(depth: int) -> st.SearchStrategy[Schema]:
    """Schemas with so many levels below. They say what people's schemas say, and some of what is refused."""
    leaves = [
        _typed("string", minLength=st.integers(0, 2), maxLength=st.integers(2, 8)),
        _typed("string", pattern=st.sampled_from(PATTERNS)),
        _typed("string", format=st.sampled_from(FORMATS)),
        _typed("integer", minimum=st.integers(-50, 10), maximum=st.integers(5, 500)),
        _typed("integer", minimum=st.integers(0, 9), multipleOf=st.integers(1, 7)),
        _typed("number", exclusiveMinimum=st.integers(-9, 9), maximum=st.integers(5, 99)),
        st.just({"type": "boolean"}),
        st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=4)}),
        st.fixed_dictionaries({"const": VALUES}),
    ]
    if not depth:
        return st.one_of(leaves)
    below = st.deferred(lambda: _schemas(depth - 1))
    several = st.lists(below, min_size=1, max_size=3)
    properties = st.dictionaries(st.sampled_from(NAMES), below, max_size=3)
    required = st.lists(st.sampled_from(NAMES), unique=True, max_size=3)
    objects = _typed("object", properties=properties, required=required, additionalProperties=st.booleans())
    items = {"items": below, "minItems": st.integers(0, 2), "maxItems": st.integers(1, 3)}
    return st.one_of(
        *(objects, objects, objects),  # They are what most people ask for.
        *(_typed("array", **items), _typed("array", **items, uniqueItems=st.just(True))),
        *(st.fixed_dictionaries({name: several}) for name in ("anyOf", "oneOf", "allOf")),
        st.fixed_dictionaries({"not": below}),
        *leaves,
    )


def _typed(name: str, **keywords: st.SearchStrategy[Any]) -> st.SearchStrategy[Schema]:
    return st.fixed_dictionaries({"type": st.just(name)}, optional=keywords)
