"""What a sandbox is to be made from, decided before anything is acquired.

Layer 5. The App says what a session gets, the request how far it goes beyond that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from cantelop_kernels.cgroup import Caps, Hierarchy
from cantelop_kernels.config import App, Config
from cantelop_kernels.errors import BadRequest, ImageError
from cantelop_kernels.image import Image, ImageStore, VerifiedImages
from cantelop_kernels.pool import Wish
from cantelop_kernels.record import SessionRecord
from cantelop_kernels.sandbox import Plan
from cantelop_kernels.schema import SessionRequest

_HELPERS_CPU = 0.5
"""CPUs for the VMM's own threads, its helper and the attendant, beside the virtual ones."""

_MAX_THREADS = 256
"""A VMM has one for each virtual CPU, and up to 64 that wait for the disk."""


class Plans:
    """May hash files, so all but `wishes` and `known` are for threads. `overhead_mib` is what a
    VMM and its helpers may take beyond the guest's memory."""

    def __init__(
        self,
        config: Config,
        state: Path,
        images: ImageStore,
        cgroups: Hierarchy,
        overhead_mib: int,
    ) -> None:
        self._config = config
        self._cgroups = cgroups
        self._overhead_mib = overhead_mib
        self._state = state
        self._images = images
        self._verified = VerifiedImages(images)

    def of(self, app: App, request: SessionRequest) -> Plan:
        """Raises ImageError and BadRequest."""
        return self._plan(
            self._verified.resolve(request.image or app.image),
            _within("vcpus", request.vcpus, app.vcpus, 1, app.max_vcpus),
            _within("memory_mib", request.memory_mib, app.memory_mib, 192, app.max_memory_mib),
            app.scratch_mib,
        )

    def wishes(self) -> list[Wish]:
        """The warm sandboxes that the Apps want."""

        def plan(app: App) -> Callable[[], Plan]:
            return lambda: self.of(app, SessionRequest(key=""))

        return [
            Wish(name, plan(app), app.warm, max(app.warm, app.warm_max))
            for name, app in self._config.apps.items()
            if max(app.warm, app.warm_max)
        ]

    def known(self, record: SessionRecord) -> Plan:
        """Of a session that runs; its image may have been removed since."""
        try:
            image = self._images.resolve(record.digest)
            image = replace(image, name=record.image)
        except ImageError:
            image = Image(record.image, record.digest, Path("/nonexistent"), {})
        return self._plan(image, record.vcpus, record.memory_mib, record.scratch_mib)

    def _plan(self, image: Image, vcpus: int, memory_mib: int, scratch_mib: int) -> Plan:
        return Plan(
            image=image,
            images=self._images,
            vcpus=vcpus,
            memory_mib=memory_mib,
            scratch_mib=scratch_mib,
            state=self._state,
            boot_deadline=self._config.boot_deadline,
            cgroups=self._cgroups,
            caps=Caps(
                cpus=vcpus + _HELPERS_CPU,
                memory=(memory_mib + self._overhead_mib) << 20,
                pids=_MAX_THREADS,
            ),
        )


def _within(name: str, asked: int | None, default: int, least: int, most: int) -> int:
    value = default if asked is None else asked
    if not least <= value <= max(most, default):
        raise BadRequest(
            f"{name} must be between {least} and {most}, not {value}",
            hint=f"the App's max_{name} sets the upper end",
        )
    return value
