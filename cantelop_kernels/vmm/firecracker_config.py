"""All that a Firecracker is told, as data: the document that it reads with `--config-file`.

Layer 3. Each resource of its API is a table here, with the API's own field names (firecracker
src/firecracker/swagger/firecracker.yaml, v1.12.1). Nothing in it comes from a guest, and of a
client only what `admission` and `plans` have let pass: the number of vCPUs and the size of memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

_REFILL_MS = 100
"""A tenth of a second's worth at a time: who has used it up waits for that long at most."""

_BURST_SECONDS = 2
"""So many seconds' worth come on top, once: that reads the whole root image while booting."""


@dataclass(frozen=True, slots=True)
class TokenBucket:
    """`size` tokens, full again after `refill_time` milliseconds. A token: a byte, or a request."""

    size: int
    refill_time: int
    one_time_burst: int | None = None

    @classmethod
    def per_second(cls, rate: int) -> TokenBucket | None:
        """None for 0, which is no limit."""
        if rate == 0:
            return None
        size = max(1, rate * _REFILL_MS // 1000)
        return cls(size, _REFILL_MS, rate * _BURST_SECONDS)


@dataclass(frozen=True, slots=True)
class RateLimiter:
    bandwidth: TokenBucket | None
    ops: TokenBucket | None = None

    @classmethod
    def of(cls, *, bytes_per_second: int, operations_per_second: int) -> RateLimiter | None:
        """None where neither is limited."""
        bandwidth = TokenBucket.per_second(bytes_per_second)
        ops = TokenBucket.per_second(operations_per_second)
        return cls(bandwidth, ops) if bandwidth or ops else None


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """Memory is anonymous, in pages of 4 KiB: huge ones are not to be had for others' asking."""

    vcpu_count: int
    mem_size_mib: int
    smt: bool = False
    track_dirty_pages: bool = False
    huge_pages: str = "None"


@dataclass(frozen=True, slots=True)
class CpuidModifier:
    """Bits of one register of a CPUID leaf: from the highest, 0, 1, or x for "as it is"."""

    leaf: str
    modifiers: tuple[dict[str, str], ...]
    subleaf: str = "0x0"
    flags: int = 0

    @classmethod
    def clear(cls, leaf: int, register: str, bit: int) -> CpuidModifier:
        bits = "".join("0" if number == bit else "x" for number in range(31, -1, -1))
        return cls(hex(leaf), ({"register": register, "bitmap": f"0b{bits}"},))


@dataclass(frozen=True, slots=True)
class CpuConfig:
    """A guest gets no virtualization of its own (THREATS.md 1), which KVM would give it by default:
    no VMX (Intel SDM, CPUID.1:ECX[5]), no SVM (AMD APM, CPUID 8000_0001h ECX[2]). KVM goes by these
    bits where a guest turns it on all the same. (firecracker docs/cpu_templates.)"""

    cpuid_modifiers: tuple[CpuidModifier, ...] = (
        CpuidModifier.clear(0x1, "ecx", 5),
        CpuidModifier.clear(0x80000001, "ecx", 2),
    )

    def encode(self) -> bytes:
        return json.dumps(_present(asdict(self)), indent=1).encode()


@dataclass(frozen=True, slots=True)
class BootSource:
    kernel_image_path: str
    initrd_path: str
    boot_args: str


@dataclass(frozen=True, slots=True)
class Drive:
    """None is the "root device": that one would be named on the kernel's command line, where the
    initramfs knows better, and would come first whatever the order. `cache_type` "Unsafe" ignores
    the guest's flushes; what it writes need not survive it."""

    drive_id: str
    path_on_host: str
    is_read_only: bool
    rate_limiter: RateLimiter | None
    is_root_device: bool = False
    cache_type: str = "Unsafe"
    io_engine: str = "Sync"


@dataclass(frozen=True, slots=True)
class Vsock:
    guest_cid: int
    uds_path: str


@dataclass(frozen=True, slots=True)
class Entropy:
    rate_limiter: RateLimiter | None


@dataclass(frozen=True, slots=True)
class Balloon:
    """Never inflated, since nobody could ask for it without an API: with `free_page_reporting`
    (v1.14) the guest gives back by itself what it has freed. Statistics would be its word only."""

    amount_mib: int = 0
    deflate_on_oom: bool = True
    stats_polling_interval_s: int = 0
    free_page_reporting: bool = True


@dataclass(frozen=True, slots=True)
class Logger:
    """Without a `log_path` it goes to the console, whose last lines are kept and shown."""

    level: str = "Warning"
    show_level: bool = True
    show_log_origin: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """One machine, complete; `cpu_config` is the path of a `CpuConfig`. There is no network device
    and no metadata service yet."""

    machine_config: MachineConfig
    cpu_config: str
    boot_source: BootSource
    drives: tuple[Drive, ...]
    vsock: Vsock
    entropy: Entropy
    balloon: Balloon | None
    logger: Logger

    def to_json(self) -> dict[str, Any]:
        """With the API's names for the resources; what is None is left out."""
        return {key.replace("_", "-"): value for key, value in _present(asdict(self)).items()}

    def encode(self) -> bytes:
        return json.dumps(self.to_json(), indent=1).encode()


def _present(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _present(one) for key, one in value.items() if one is not None}
    if isinstance(value, tuple | list):
        return [_present(one) for one in value]
    return value
