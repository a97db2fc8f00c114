"""Tables of the fields of pydantic classes: what a key is called, what it takes, and what it means."""

from collections.abc import Collection

from pydantic import BaseModel

from docs.site.markdown import code, escaped, table
from nemo_gym.config.options import meanings_of, options_of


def fields_table(config_class: type[BaseModel], *, prefix: str = "", without: Collection[str] = ()) -> str:
    """One row per field, the required ones first; `without` leaves out fields that are explained elsewhere."""
    meanings = meanings_of(config_class)
    options = [option for option in options_of(config_class) if option.field not in without]
    return table(
        ("Key", "Takes", "Unless set", "Meaning"),
        (
            (
                code(f"{prefix}{option.name}") + "".join(f", {code(prefix + name)}" for name in option.names[1:]),
                escaped(option.expects),
                "**required**" if option.default is None else code(option.default),
                escaped(meanings.get(option.field, "")),
            )
            for option in sorted(options, key=lambda option: option.default is not None)
        ),
    )
