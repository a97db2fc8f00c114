"""Names that programs elsewhere replace on the public facade `nemo_gym.server_utils`.

Their tests patch the facade and expect the client below it to notice, so these names are looked
up there when they are used. The facade is never imported from here: what nobody has loaded,
nobody has replaced.
"""

import sys
from typing import TypeVar

T = TypeVar("T")

_FACADE = "nemo_gym.server_utils"


def replaceable(name: str, default: T) -> T:
    """What the facade calls `name` at this moment; `default` while it is not loaded."""
    found: T = getattr(sys.modules.get(_FACADE), name, default)
    return found
