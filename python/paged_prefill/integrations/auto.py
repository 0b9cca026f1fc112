"""On import, installs the adapters that the environment variable PAGED_PREFILL_INSTALL names."""

from . import install_from_environment

install_from_environment()
