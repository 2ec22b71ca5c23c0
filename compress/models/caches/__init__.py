"""Cache policies: how keys and values of attention are stored, one file per policy.

Nothing is registered by hand: all files are imported, and `base.CACHE_POLICIES` holds the policies by their kind.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
