"""A plugin for pytest: the wire transport as if its modules and its line in the registry had been deleted."""

import sys
from typing import Any

from nemo_gym.http.transports import base

WIRE = "nemo_gym.http.transports.wire"

modules: dict[str, Any] = sys.modules
modules.update({WIRE: None, f"{WIRE}_connection": None})  # importing either fails
base.TRANSPORTS.remove(WIRE)
