"""The Jupyter plugin: starts a kernel in a microVM through the daemon's socket.

Found by jupyter_client through the entry point "cantelop". Nothing of the byte path is here: the
channels are relayed by the attendant, so this package may be idle, or gone, between calls.
"""

from __future__ import annotations

from cantelop_provisioner.provisioner import CantelopProvisioner

__all__ = ["CantelopProvisioner"]
