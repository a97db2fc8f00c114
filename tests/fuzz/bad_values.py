"""Values that programs stumble over, as strategies."""

from typing import Any

from hypothesis import strategies as st

NASTY_TEXT = st.sampled_from(
    [
        "", " ", "???", "null", "true", "~", "${", "${a}", "${a.b[0]}", "${oc.env:NOWHERE}", "${oc.env:HOME}",
        "${${a}}", "${inherit_from:a}", "${copy:a.b}", "${oc.decode:'['}", "${oc.create:[1}", "\\${a}", "****", "auto",
        "..", "../..", "/", "a/b", "\x00", "\x1b[2J", "\u202e", "é" * 3, "日本", "1e400", "-0", "0x1f", "1_000", "nan",
        ".inf", "a: b", "- a", "%s", "{x}", "[", "]", "{a: }", "!!python/object:os.system", "&a *a", "\ud800",
        "x" * 300,
    ]
)  # fmt: skip
TEXT = st.one_of(NASTY_TEXT, st.text(max_size=12))
NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70), st.floats(), st.sampled_from([0, 1, -1, 65536, 2**63, 2**64, 10**400, 1e308])
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXT)


def trees(keys: st.SearchStrategy[Any], scalars: st.SearchStrategy[Any] = SCALARS) -> st.SearchStrategy[Any]:
    """Nested values whose mappings have such keys."""
    return st.recursive(
        scalars,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=4)),
        max_leaves=10,
    )


def json_trees(keys: st.SearchStrategy[str] = TEXT) -> st.SearchStrategy[Any]:
    """The same, as far as JSON has them."""
    numbers = st.one_of(st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False, allow_infinity=False))
    return trees(keys, st.one_of(st.none(), st.booleans(), numbers, TEXT))
