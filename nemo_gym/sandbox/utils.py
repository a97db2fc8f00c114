"""Small helpers for agents that use sandboxes."""


def rewrite_image(image: str | None, rewrites: list[dict[str, str]]) -> str | None:
    """The image under its other name: the first of `{from, to}` whose `from` it begins with decides.

    Raises:
        ValueError: a rule that lacks one of both.
    """
    if image is None:
        return None
    for rule in rewrites:
        if "from" not in rule or "to" not in rule:
            raise ValueError(f"a rule for images must have `from` and `to`: {dict(rule)}")
        if image.startswith(rule["from"]):
            return rule["to"] + image[len(rule["from"]) :]
    return image
