"""Stands for `nemo_gym` in processes that servers run in: whoever imports it gets the package this file lies in.

A checkout of another nemo-gym among the search roots has a package of that name, too, beside the servers that
are wanted from it. This folder holds nothing else, so on a search path it decides that one name only.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_OWN = Path(__file__).absolute().parents[1]
_spec = spec_from_file_location(__name__, _OWN / "__init__.py", submodule_search_locations=[str(_OWN)])
assert _spec is not None
assert _spec.loader is not None
sys.modules[__name__] = _module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
